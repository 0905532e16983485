"""Results folders, as `scripts/eval.py` leaves them: read and checked."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.records import Record

META = (
    *("command", "config", "versions", "git_revision", "model", "template", "essays", "data", "seed"),
    *("policies", "tasks"),
)
FIELDS = {field.name for field in dataclasses.fields(Record)}


@dataclass(frozen=True)
class Run:
    folder: Path
    meta: dict[str, Any]
    records: list[Record]
    notes: list[str]


def read_run(folder: Path) -> Run:
    """A results folder. Raises ValueError for one that is none, and for a line that is no record."""
    files = sorted(folder.glob("records*.jsonl"))
    if not files:
        raise ValueError(f"{folder} holds no records.jsonl: give folders that scripts/eval.py has written")
    meta = _read_meta(folder / "run_meta.json")
    records: list[Record] = []
    notes: list[str] = []
    for file in files:
        _read_records(file, meta, records, notes)
    if not records:
        raise ValueError(f"there are no records in {', '.join(map(str, files))}")
    return Run(folder, meta, records, notes)


def _read_meta(file: Path) -> dict[str, Any]:
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    missing = [key for key in META if not isinstance(meta, dict) or key not in meta]
    if missing:
        raise ValueError(f"{file} does not describe a run of scripts/eval.py: it has no {', '.join(missing)}")
    if "name" not in meta["model"]:
        raise ValueError(f"{file} does not name its model")
    return dict(meta)


def _read_records(file: Path, meta: dict[str, Any], records: list[Record], notes: list[str]) -> None:
    """Adds what is in one file. A line counts once its newline is there."""
    *lines, rest = file.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not valid JSON: {error}") from error
        records.append(_record(values, meta, where))
    if rest:
        notes.append(f"{file}, line {len(lines) + 1}, was not written to its end: left out.")


def _record(values: Any, meta: dict[str, Any], where: str) -> Record:
    missing = FIELDS.difference(values) if isinstance(values, dict) else FIELDS
    if missing:
        raise ValueError(f"{where} is no record: it has no {', '.join(sorted(missing))}")
    record = Record(**{name: values[name] for name in FIELDS})
    score = record.score
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not 0 <= score <= 1:
        raise ValueError(f"{where}: a score is a number from 0 to 1, got {score!r}")
    for kind, name in (("policies", record.policy), ("tasks", record.task)):
        if name not in meta[kind]:
            raise ValueError(f"{where}: {name!r} is not among the {kind} of run_meta.json")
    return record
