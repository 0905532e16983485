"""Results folders, as `scripts/eval.py` leaves them: read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inertiakv.evals.records import Record, read_records
from inertiakv.evals.run_meta import read_meta


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
    meta, records = read_meta(folder), read_records(folder)
    if not records:
        raise ValueError(f"there are no records in {', '.join(map(str, files))}")
    for record in records:
        _check(record, meta, folder)
    cut = [file for file in files if not file.read_bytes().endswith(b"\n") and file.stat().st_size]
    notes = [f"The last line of {file} was not written to its end: left out." for file in cut]
    if meta.get("finished", "") is None:
        notes.append(f"The run in {folder} has not finished: the same command with --resume goes on.")
    return Run(folder, meta, records, notes)


def _check(record: Record, meta: dict[str, Any], folder: Path) -> None:
    where = f"{folder}: {record.policy} on {record.task}, length {record.length}, sample {record.index}"
    for kind, name in (("policies", record.policy), ("tasks", record.task)):
        if name not in meta[kind]:
            raise ValueError(f"{where}: {name!r} is not among the {kind} of run_meta.json")
