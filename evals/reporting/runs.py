"""Results folders of `scripts/eval.py`: read, checked, and put together to suites."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inertiakv.evals.records import Record, read_records
from inertiakv.evals.run_meta import read_meta

from .suites import Arm, Setting, Suite, recorded_options

VARYING = ("seconds", "cache_bytes")
"""Fields that may differ between two records of the same answer."""


@dataclass(frozen=True)
class Run:
    folder: Path
    meta: dict[str, Any]
    records: list[Record]
    notes: list[str]


def read_run(folder: Path) -> Run:
    """A results folder. Raises ValueError where it is none, and for a malformed or unexpected record."""
    files = sorted(folder.glob("records*.jsonl"))
    if not files:
        raise ValueError(f"{folder} holds no records.jsonl: give folders that scripts/eval.py has written")
    meta, records = read_meta(folder), read_records(folder)
    if not records:
        raise ValueError(f"there are no records in {', '.join(map(str, files))}")
    for record in records:
        for kind, name in (("policies", record.policy), ("tasks", record.task)):
            if name not in meta[kind]:
                raise ValueError(
                    f"{folder}: {record.policy} on {_sample(record)}: {name!r} is not among the {kind} of "
                    "run_meta.json"
                )
    cut = [file for file in files if not file.read_bytes().endswith(b"\n") and file.stat().st_size]
    notes = [f"The last line of {file} was not written to its end: left out." for file in cut]
    if meta.get("finished", "") is None:
        notes.append(f"The run in {folder} has not finished: the same command with --resume goes on.")
    return Run(folder, meta, records, notes)


def combine(runs: Sequence[Run]) -> tuple[list[Suite], list[str]]:
    """All suites, and notes for the reader. Raises ValueError where two runs contradict one another."""
    by_identity: dict[str, list[Run]] = {}
    for run in runs:
        by_identity.setdefault(json.dumps(_identity(run), sort_keys=True), []).append(run)
    names = _names([_identity(group[0]) for group in by_identity.values()])
    suites: list[Suite] = []
    notes = [note for run in runs for note in run.notes]
    for name, group in zip(names, by_identity.values(), strict=True):
        suites += _suites(name, group, notes)
    return suites, notes


def _identity(run: Run) -> dict[str, Any]:
    """What results must have in common to be compared."""
    template = {"template": run.meta["template"]["kind"], "template's sha256": run.meta["template"]["sha256"]}
    return {**run.meta["model"], **template, "seed": run.meta["seed"]}


def _names(identities: Sequence[dict[str, Any]]) -> list[str]:
    """For each the model's name, and whatever tells it from another with the same name."""
    short = [str(identity["name"]).rstrip("/").split("/")[-1] for identity in identities]
    names = []
    for name, identity in zip(short, identities, strict=True):
        alike = [other for other, of in zip(identities, short, strict=True) if of == name]
        differing = [key for key in identity if any(other.get(key) != identity[key] for other in alike)]
        names.append(", ".join([name, *(f"{key} {identity[key]}" for key in differing)]))
    return names


def _suites(name: str, runs: Sequence[Run], notes: list[str]) -> list[Suite]:
    policies = _agreed(runs, "policies", recorded_options, "rule")
    metrics = _agreed(runs, "tasks", lambda task: str(task["metric"]), "metric")
    setting = Setting(name, str(runs[0].meta["model"]["name"]), policies, metrics)
    suites: dict[tuple[str, int | None], Suite] = {}
    for record in _merge(runs, notes):
        benchmark = record.task.partition(":")[0]
        suite = suites.setdefault((benchmark, record.length), Suite(setting, benchmark, record.length, {}))
        arm = Arm(record.policy, record.compression, record.budget_asked)
        suite.records.setdefault((arm, record.task), {})[record.index] = record
    return [suites[key] for key in sorted(suites, key=lambda key: (key[0], key[1] or 0))]


def _agreed(runs: Sequence[Run], key: str, read: Callable[[Any], Any], what: str) -> dict[str, Any]:
    """The policies or tasks of all runs. Raises ValueError where one name stands for two things."""
    known: dict[str, tuple[Any, Path]] = {}
    for run in runs:
        for name, value in run.meta[key].items():
            _agree(known, name, read(value), run.folder, f"{name!r} is one {what}")
    return {name: value for name, (value, _) in known.items()}


def _merge(runs: Sequence[Run], notes: list[str]) -> list[Record]:
    """Each record once. Raises ValueError where two of the same prompt, or answer, differ."""
    records: dict[tuple[Any, ...], Record] = {}
    prompts: dict[Any, tuple[Any, Path]] = {}
    answers: dict[Any, tuple[Any, Path]] = {}
    for run in runs:
        for record in run.records:
            sample, prompt = _sample(record), (record.prompt_sha256, record.references)
            answer = {name: value for name, value in vars(record).items() if name not in VARYING}
            _agree(prompts, record.key[:3], prompt, run.folder, f"{sample} is one prompt")
            _agree(answers, record.key, answer, run.folder, f"{record.policy} on {sample} gave one answer")
            records.setdefault(record.key, record)
    if repeated := sum(len(run.records) for run in runs) - len(records):
        notes.append(f"{repeated} records are there twice, with the same answer: counted once.")
    return list(records.values())


def _agree(known: dict[Any, tuple[Any, Path]], key: Any, value: Any, folder: Path, what: str) -> None:
    """Note a value, or raise ValueError where another folder has another one."""
    other, where = known.setdefault(key, (value, folder))
    if other != value:
        raise ValueError(f"{what} in {where} and another in {folder}")


def _sample(record: Record) -> str:
    return f"{record.task}, length {record.length}, sample {record.index}"
