"""`run_meta.json`: all that the records of a folder depend on, and whether a run may go on with them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evals.essays import Essays
from evals.prompting import Prompting
from evals.rules import KEPT, Rule
from evals.run_meta import NAME, read_meta
from evals.task import Task
from inertiakv import EvictionConfig
from models import Transformer
from scripts.benchmarking import machine, results

BINDING = ("config", "model", "template", "essays", "data", "policies", "tasks")
"""What must be the same for a run to go on."""
UNBOUND = ("started", "versions", "git_revision", "machine", "ranks")
"""What may differ, and is noted."""
FREE = ("out", "resume", "json", "batch", "tensor_parallel_size", "device", "attention", "compile")
"""Options of `config` that may differ: how records are made, and where they go, but not what they say."""
EXTRAS = ("tokenizers", "datasets", "rouge", "scipy", "wonderwords")
"""Packages that prompts and scores depend on, too."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def describe(
    command: str,
    config: dict[str, Any],
    model: Transformer,
    prompting: Prompting,
    rules: Sequence[Rule],
    tasks: Sequence[Task],
    essays: Essays | None,
    ranks: int,
) -> dict[str, Any]:
    """What a run is. `config` are the options of its command line."""
    template = prompting.tokenizer.chat_template if prompting.template == "chat" else None
    return {
        "command": command,
        "config": config,
        "versions": machine.versions(*EXTRAS),
        "git_revision": machine.revision(),
        "model": {
            "name": config["model"],
            "source": str(model.source),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantize": config["quantize"],
        },
        "template": {"kind": prompting.template, "sha256": template and _sha256(str(template))},
        "essays": essays and {"name": essays.name, "sha256": essays.sha256},
        "data": {task.name: str(task.source) for task in tasks if hasattr(task, "source")},
        "seed": config["seed"],
        "policies": {rule.policy: rule.eviction and _fields(rule.eviction) for rule in rules},
        "tasks": {task.name: {"metric": task.metric} for task in tasks},
        "machine": machine.describe(model.device),
        "ranks": ranks,
        "started": now(),
        "finished": None,
    }


def _fields(eviction: EvictionConfig) -> dict[str, Any]:
    """Of all sizes of a rule: how much is kept is among the options, and in each record."""
    return {name: value for name, value in dataclasses.asdict(eviction).items() if name not in KEPT}


def start(folder: Path, meta: dict[str, Any], *, resume: bool, note: bool) -> list[str]:
    """Describe the new run in a folder, or check that the one there is the same: with `resume` one that goes
    on, which is noted with `note`, else one that another process has begun just now. What has changed of its
    software since then. Raises ValueError where the settings are others."""
    file = folder / NAME
    begun = file.is_file()
    if not begun:
        folder.mkdir(parents=True, exist_ok=True)
        results.write(file, meta)
    there = read_meta(folder)
    check_same(folder, there, meta, BINDING if resume else (*BINDING, "ranks"))
    if begun and resume and note:
        noted = {key: meta[key] for key in ("command", *UNBOUND)}
        results.write(file, there | {"resumed": [*there.get("resumed", []), noted]})
    return [line for key in ("versions", "git_revision") for line in differences(there[key], meta[key], key)]


def finish(folder: Path) -> None:
    """Note that all records are there."""
    results.write(folder / NAME, {**read_meta(folder), "finished": now()})


def check_same(folder: Path, there: dict[str, Any], meta: dict[str, Any], binding: Sequence[str]) -> None:
    """Raise ValueError, naming what differs, where a run with other settings made the records in a folder."""
    old, new = (
        {**of, "config": {name: value for name, value in of["config"].items() if name not in FREE}}
        for of in (there, meta)
    )
    differing = [line for key in binding for line in differences(old.get(key), new[key], key)]
    if differing:
        raise ValueError(f"{folder} is of another run, this one cannot go on with it: {'; '.join(differing)}")


def differences(old: Any, new: Any, name: str) -> Iterator[str]:
    """Where two values of JSON differ, in words."""
    new = json.loads(json.dumps(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from differences(old.get(key), new.get(key), f"{name}.{key}")
    elif old != new:
        yield f"{name} was {old!r} and is {new!r}"
