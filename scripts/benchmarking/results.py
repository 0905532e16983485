"""Results files of `scripts/bench.py`: read, written, and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

from inertiakv.models.files import read_json

NEEDED = ("machine", "versions", "command", "read_gb_per_s", "contenders")


def read(file: Path) -> dict[str, Any]:
    """A results file. Raises ValueError if it is none."""
    result: Any = read_json(file)
    missing = [key for key in NEEDED if not isinstance(result, dict) or key not in result]
    if missing:
        raise ValueError(f"{file} is no results file of bench.py: it has no {', no '.join(missing)}")
    return result


def write(file: Path, result: dict[str, Any]) -> None:
    """Write a JSON file in one piece: if this fails, an older file stays as it is."""
    unfinished = file.with_name(f"{file.name}.{uuid4().hex}.part")  # a name that no other process uses
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)


def merge(result: dict[str, Any], other: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The contenders of another results file `name`, with times relative to the reference in `result`."""
    try:
        return _merge(result, other, name)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} is no results file of bench.py: {type(error).__name__}: {error}") from error


def _merge(result: dict[str, Any], other: dict[str, Any], name: str) -> list[dict[str, Any]]:
    settings = ("dtype", "context", "batch")
    references = {
        tuple(c[key] for key in settings): c["ms_per_step"]["median"]
        for c in reversed(result["contenders"])  # the first of several counts
        if c["name"] == result["reference"]
    }
    mark = {"name": name, "versions": other["versions"], "read_gb_per_s": other["read_gb_per_s"]}
    merged = []
    for contender in other["contenders"]:
        ms = references.get(tuple(contender[key] for key in settings))
        ratio = None if ms is None else round(contender["ms_per_step"]["median"] / ms, 4)
        merged.append({**contender, "ratio": ratio, "merged_from": mark})
    return merged
