"""What a results folder holds: a record of each answer, one JSON object a line, and `run_meta.json`, which
tells of the run.

A line counts once its newline is there: what a killed run has left of a last line is no record.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, get_type_hints

from inertiakv.models.files import read_json

from .forms import check

try:
    import fcntl
except ImportError:  # there are systems without it, and so without locks
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Record:
    """One sample, answered under one rule."""

    task: str
    """As in `Sample`, with its `length` and `index`."""
    length: int | None
    index: int
    policy: str
    """The rule as it was asked for: a policy's name, and what was changed of it, `inertiakv:alpha=0.3`."""
    compression: float | None
    """Share of the prompt that was to be evicted; None for the full cache, and where a budget was given."""
    budget_asked: int | None
    """The budget, where one was given instead."""
    prompt_sha256: str
    prompt_tokens: int
    bos_count: int
    budget: int | None
    """Tokens that the rule may keep of this prompt; None: all."""
    kept_tokens: float
    """Tokens in the cache at the end, a mean over retention sets."""
    cache_bytes: int
    """Of this row's share of the decode cache, as allocated, on all ranks that hold the model."""
    prediction: str
    references: list[str]
    score: float
    """From 0 to 1."""
    answer_tokens: int
    """Tokens chosen, with the one that ended it."""
    finish_reason: str
    seconds: dict[str, float]
    """Of the batch that the answer was in, divided by its rows: `prefill` (once for all rules), `first_step`,
    `decode`, `compile`."""
    facts: dict[str, Any]
    """As in `Sample`."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes a record another one's repetition."""
        return (self.task, self.length, self.index, self.policy, self.compression, self.budget_asked)


SECONDS = ("prefill", "first_step", "decode", "compile")
FORM = get_type_hints(Record) | {"references": [str], "seconds": dict.fromkeys(SECONDS, float), "facts": dict}


class RecordFile:
    """Appends records to a file, each of them on the disk before the next, and keeps other processes from
    doing so. Opening it cuts off what is left of a record that was not written to its end. Raises ValueError
    for a file that is open elsewhere."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115 (as long as the run)
        _lock(self._file)
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def append(self, record: Record) -> None:
        self._file.write(json.dumps(dataclasses.asdict(record)).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _lock(file: BinaryIO) -> None:
    """Until it is closed, where system and disk have locks."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"another process is writing {file.name}") from None
    except OSError:
        pass


def read_records(folder: Path) -> list[Record]:
    """The records in all files of a folder. Raises ValueError for a line that is none, and for a record that
    is there twice."""
    records: dict[tuple[Any, ...], Record] = {}
    for path in sorted(folder.glob("records*.jsonl")):
        lines = path.read_bytes().split(b"\n")[:-1]
        for number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
                check(fields, FORM)
                if not 0 <= fields["score"] <= 1:
                    raise ValueError(f"score must be from 0 to 1, got {fields['score']}")
                record = Record(**fields)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is no record: {error}") from error
            if record.key in records:
                raise ValueError(f"{path}, line {number} repeats the record {record.key}")
            records[record.key] = record
    return list(records.values())


@dataclass(frozen=True)
class Mean:
    """The mean score of one task, at one length, under one rule."""

    task: str
    length: int | None
    policy: str
    compression: float | None
    budget: int | None
    n: int
    score: float


def means(records: Iterable[Record]) -> list[Mean]:
    """Mean scores, in the order in which they first come."""
    scores: dict[tuple[str, int | None, str, float | None, int | None], list[float]] = {}
    for r in records:
        of = (r.task, r.length, r.policy, r.compression, r.budget_asked)
        scores.setdefault(of, []).append(r.score)
    return [Mean(*of, n=len(values), score=sum(values) / len(values)) for of, values in scores.items()]


# run_meta.json

NAME = "run_meta.json"

META_FORM = {
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
* `template`: with `args` where it is given something beside the messages.
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
    meta: dict[str, Any] = read_json(file)
    try:
        check(meta, META_FORM)
        check(meta.get("asked", []), [ASKED], "asked")
    except ValueError as error:
        raise ValueError(f"{file} does not describe a run of scripts/eval.py: {error}") from error
    return meta
