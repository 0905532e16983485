"""What `run_meta.json` tells of the run whose records are beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .forms import check

NAME = "run_meta.json"

FORM = {
    **{"command": str, "config": dict, "versions": {str: str}, "seed": int},
    "git_revision": ({"commit": str, "dirty": bool}, None),
    "model": {"name": str},
    "template": {"kind": str, "sha256": str | None},
    "essays": ({"name": str, "sha256": str}, None),
    "data": {str: str},
    "policies": {str: dict | None},
    "tasks": {str: {"metric": str}},
}
"""What must be there. A run writes more, which nothing depends on, but for `asked`.

* `config`: all options of the first command, by their names.
* `git_revision`: `dirty` where files differ from the commit.
* `data`: of tasks with data, where they are from.
* `policies`: the fields of each one's config; None is the full cache.
"""
ASKED = {"command": str, "rules": [str], "samples": {str: int}}
"""What one command asks: so many samples of each task (by `task_label`), under all of its rules (as
`rules.label` calls them). There is one for the first command, and for each that asked for more."""


def task_label(task: str, length: int | None) -> str:
    """`ruler:vt 4096`, or `longbench:hotpotqa`, which is of no length."""
    return task if length is None else f"{task} {length}"


def asked_keys(meta: Mapping[str, Any]) -> set[tuple[str, str, int]]:
    """Rule, task and index of every record that a run has been asked for."""
    return {
        (rule, task, index)
        for asked in meta.get("asked", [])
        for rule in asked["rules"]
        for task, samples in asked["samples"].items()
        for index in range(samples)
    }


def read_meta(folder: Path) -> dict[str, Any]:
    """Raises ValueError, naming the file and what is wrong in it, where it describes no run."""
    file = folder / NAME
    try:
        meta: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    try:
        check(meta, FORM)
        check(meta.get("asked", []), [ASKED], "asked")
    except ValueError as error:
        raise ValueError(f"{file} does not describe a run of scripts/eval.py: {error}") from error
    return meta
