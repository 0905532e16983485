"""`run_meta.json`: all that the records of a folder depend on, and whether a run may go on with them, or ask
for more."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inertiakv import EvictionConfig
from inertiakv.evals.essays import Essays
from inertiakv.evals.records import NAME, Record, asked_keys, read_meta, task_label
from inertiakv.evals.rules import KEPT, Rule, label
from inertiakv.evals.run import Evaluation, Group
from inertiakv.scripts.benchmarking import machine, results

BINDING = ("config", "model", "template")
"""What must be the same for a run to go on."""
SHARED = ("essays", "data", "policies", "tasks")
"""What must be the same where both have it."""
UNBOUND = ("started", "versions", "git_revision", "machine", "ranks")
"""What may differ, and is noted."""
FREE = ("out", "resume", "json", "batch", "tensor_parallel_size", "device", "attention", "compile")
"""Options of `config` that may differ: how records are made, and where they go, but not what they say."""
MORE = ("tasks", "lengths", "samples", "policies", "compression", "budget", "essays", "data")
"""Options of `config` that say what is asked, which each record tells of itself: a run may go on with others.
What follows from them is in `SHARED`."""
EXTRAS = ("tokenizers", "datasets", "rouge", "scipy", "wonderwords")
"""Packages that prompts and scores depend on, too."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def describe(
    command: str,
    config: dict[str, Any],
    evaluation: Evaluation,
    rules: Sequence[Rule],
    groups: Sequence[Group],
    essays: Essays | None,
) -> dict[str, Any]:
    """What a run is, but for its model and ranks. `config` are the options of its command line."""
    prompting, tasks = evaluation.prompting, [group.task for group in groups]
    samples = {task_label(group.task.name, group.length): len(group.indices) for group in groups}
    template = prompting.tokenizer.chat_template if prompting.template == "chat" else None
    return {
        "command": command,
        "config": config,
        "versions": machine.versions(*EXTRAS),
        "git_revision": machine.revision(),
        "template": {
            "kind": prompting.template,
            "sha256": template and hashlib.sha256(str(template).encode()).hexdigest(),
            **({"args": prompting.args} if prompting.args else {}),
        },
        "essays": essays and {"name": essays.name, "sha256": essays.sha256},
        "data": {task.name: str(task.source) for task in tasks if hasattr(task, "source")},
        "seed": config["seed"],
        "policies": {rule.policy: rule.eviction and _fields(rule.eviction) for rule in rules},
        "tasks": {task.name: {"metric": task.metric} for task in tasks},
        "asked": [{"command": command, "rules": [str(rule) for rule in rules], "samples": samples}],
        "machine": machine.describe(evaluation.model.device),
        "started": now(),
        "finished": None,
    }


def _fields(eviction: EvictionConfig) -> dict[str, Any]:
    """Of all sizes of a rule: how much is kept is among the options, and in each record."""
    return {name: value for name, value in dataclasses.asdict(eviction).items() if name not in KEPT}


def check(folder: Path, meta: dict[str, Any], *, resume: bool) -> None:
    """Raise ValueError where a run with other settings is in the folder."""
    if (folder / NAME).is_file():
        check_same(folder, read_meta(folder), meta, more=resume)


def start(folder: Path, meta: dict[str, Any], *, resume: bool, note: bool) -> list[str]:
    """Describe the new run in a folder, or check that the one there is the same: with `resume` one that goes
    on and may ask for more, which is noted with `note`, else one that another process has begun just now.
    Returns what has changed of its software since then. Raises ValueError where the settings are others."""
    file = folder / NAME
    begun = file.is_file()
    if not begun:
        results.write(file, meta)
    there = read_meta(folder)
    check_same(folder, there, meta, more=resume)
    if begun and resume and note:
        noted = {key: meta[key] for key in ("command", *UNBOUND)}
        results.write(file, extended(there, meta) | {"resumed": [*there.get("resumed", []), noted]})
    return [line for key in ("versions", "git_revision") for line in differences(there[key], meta[key], key)]


def extended(there: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """What is there, and what a run asks for beyond."""
    both = {key: {**(there[key] or {}), **(meta[key] or {})} or there[key] for key in SHARED}
    if asked_keys(meta) <= asked_keys(there):
        return there | both
    return there | both | {"asked": [*there.get("asked", []), *meta["asked"]], "finished": None}


def finish(folder: Path, meta: dict[str, Any], records: Sequence[Record]) -> None:
    """Note where all records are there: of this run, and of what it has gone on with."""
    there = read_meta(folder)
    keys = {
        (label(r.policy, r.compression, r.budget_asked), task_label(r.task, r.length), r.index)
        for r in records
    }
    if asked_keys(there) | asked_keys(meta) <= keys:
        results.write(folder / NAME, {**there, "finished": now()})


def check_same(folder: Path, there: dict[str, Any], meta: dict[str, Any], *, more: bool) -> None:
    """Raise ValueError, naming what differs, where a run with other settings made the records in a folder.
    With `more` it may have asked for other tasks, samples or rules."""
    free = (*FREE, *MORE) if more else FREE
    old, new = (
        {**of, "config": {name: value for name, value in of["config"].items() if name not in free}}
        for of in (there, meta)
    )
    if more:
        old |= {key: _common(old[key], new[key]) for key in SHARED}
        new |= {key: _common(new[key], old[key]) for key in SHARED}
    binding = (*BINDING, *SHARED) if more else (*BINDING, *SHARED, "ranks")
    differing = [line for key in binding for line in differences(old.get(key), new[key], key)]
    if differing:
        raise ValueError(f"{folder} is of another run, this one cannot go on with it: {'; '.join(differing)}")


def _common(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any]:
    """What of one has its name in the other, too."""
    return {name: value for name, value in (one or {}).items() if name in (other or {})}


def differences(old: Any, new: Any, name: str) -> Iterator[str]:
    """Where two values of JSON differ, in words."""
    new = json.loads(json.dumps(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from differences(old.get(key), new.get(key), f"{name}.{key}")
    elif old != new:
        yield f"{name} was {old!r} and is {new!r}"
