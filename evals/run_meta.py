"""What `run_meta.json` tells of the run whose records are beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from inertiakv.models.files import read_json

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
    args: NotRequired[dict[str, Any]]
    """What the template is given beside the messages, if anything."""


class Essays(TypedDict):
    name: str
    sha256: str


class Revision(TypedDict):
    commit: str
    dirty: bool
    """Whether files differ from the commit."""


class Task(TypedDict):
    metric: str


class Asked(TypedDict):
    """What one command asks: so many samples of each task, under all of its rules."""

    command: str
    rules: list[str]
    """As `rules.label` calls them."""
    samples: dict[str, int]
    """By `task_label`."""


class RunMeta(TypedDict):
    """What must be there. A run writes more, which nothing depends on."""

    command: str
    config: dict[str, Any]
    """All options of the first command, by their names."""
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
    asked: NotRequired[list[Asked]]
    """The first command, and those that asked for more. `data`, `essays`, `policies` and `tasks` are those of
    all."""
    finished: NotRequired[str | None]
    resumed: NotRequired[list[dict[str, Any]]]


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
    meta: dict[str, Any] = read_json(file)
    try:
        check(meta, RunMeta)
    except ValueError as error:
        raise ValueError(f"{file} does not describe a run of scripts/eval.py: {error}") from error
    return meta
