"""Results files: reading one, and putting its contenders beside those of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

NEEDED = ("machine", "versions", "command", "read_gb_per_s", "contenders")


def read(file: Path) -> dict[str, Any]:
    """A results file. Raises ValueError where it is none."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    missing = [key for key in NEEDED if not isinstance(result, dict) or key not in result]
    if missing:
        raise ValueError(f"{file} is no results file of bench.py: it has no {', no '.join(missing)}")
    return result


def write(file: Path, result: dict[str, Any]) -> None:
    """Write a results file, or leave the one that is there as it is: never half of one."""
    unfinished = file.with_name(f"{file.name}.{uuid4().hex}.part")  # no other process's
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)


def merge(result: dict[str, Any], other: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The contenders of another run, marked with its name, their times set against this one's reference."""
    mark = {"name": name, "versions": other["versions"], "read_gb_per_s": other["read_gb_per_s"]}
    return [
        {**contender, "ratio": _ratio(result, contender), "merged_from": mark}
        for contender in other["contenders"]
    ]


def _ratio(result: dict[str, Any], contender: dict[str, Any]) -> float | None:
    setting = ("name", "dtype", "context", "batch")
    wanted = [result["reference"], *(contender[key] for key in setting[1:])]
    reference = next((c for c in result["contenders"] if [c[key] for key in setting] == wanted), None)
    if reference is None:
        return None
    return round(contender["ms_per_step"]["median"] / reference["ms_per_step"]["median"], 4)
