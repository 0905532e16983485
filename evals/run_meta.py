"""What `run_meta.json` tells of the run whose records are beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from .typed import check

NAME = "run_meta.json"


class Model(TypedDict):
    name: str
    source: NotRequired[str]
    dtype: NotRequired[str]
    quantize: NotRequired[str | None]


class Template(TypedDict):
    kind: str
    sha256: str | None


class Essays(TypedDict):
    name: str
    sha256: str


class Revision(TypedDict):
    commit: str
    dirty: bool
    """Whether files differ from the commit."""


class Task(TypedDict):
    metric: str


class RunMeta(TypedDict):
    """What must be there. A run writes more, which nothing depends on."""

    command: str
    config: dict[str, Any]
    """All options, by their names."""
    versions: dict[str, str]
    git_revision: Revision | None
    model: Model
    template: Template
    essays: Essays | None
    data: dict[str, str]
    """Of tasks with data: where they are from."""
    seed: int
    policies: dict[str, dict[str, Any] | None]
    """The fields of each one's config; None is the full cache."""
    tasks: dict[str, Task]
    finished: NotRequired[str | None]
    resumed: NotRequired[list[dict[str, Any]]]


def read_meta(folder: Path) -> dict[str, Any]:
    """Raises ValueError, naming the file and what is wrong in it, where it describes no run."""
    file = folder / NAME
    try:
        meta: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    try:
        check(meta, RunMeta)
    except ValueError as error:
        raise ValueError(f"{file} does not describe a run of scripts/eval.py: {error}") from error
    return meta
