"""Results folders as `scripts/eval.py` leaves them, with answers made up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from inertiakv import policy
from inertiakv.evals.records import Record

CHANGES: dict[str, dict[str, Any]] = {
    "inertiakv:alpha=0.0": {"alpha": 0.0},
    "inertiakv:alpha=0.3": {"alpha": 0.3},
    "inertiakv:coupling=temporal": {"coupling": "temporal"},
}
"""Of policies that are a named one with something changed."""

Score = Callable[[str, str, float | None, int], float]
"""Of a task, a policy, a compression, and a sample's index."""


def make_record(task: str, length: int | None, index: int, policy: str, **values: Any) -> Record:
    compression = values.pop("compression", None if policy == "full" else 0.9)
    kept = 1000 if compression is None else round(1000 * (1 - compression))
    made: dict[str, Any] = {
        "task": task,
        "length": length,
        "index": index,
        "policy": policy,
        "compression": compression,
        "budget_asked": None,
        "prompt_sha256": f"{task} {length} {index}",
        "prompt_tokens": 1000,
        "bos_count": 1,
        "budget": None if compression is None else kept,
        "kept_tokens": float(kept),
        "cache_bytes": 1000 * kept,
        "prediction": "7",
        "references": ["7"],
        "score": 1.0,
        "answer_tokens": 20,
        "finish_reason": "eos",
        "seconds": {"prefill": 1.0, "first_step": 0.1, "decode": 0.5, "compile": 0.0},
        "facts": {},
    }
    return Record(**(made | values))


def make_records(
    tasks: Sequence[str],
    length: int | None,
    policies: Sequence[str],
    score: Score,
    *,
    compressions: Sequence[float] = (0.9,),
    samples: int = 8,
    facts: Callable[[int], dict[str, Any]] = lambda index: {},
) -> Iterator[Record]:
    for task in tasks:
        for index in range(samples):
            for name in policies:
                for compression in compressions if name != "full" else [None]:
                    value = score(task, name, compression, index)
                    yield make_record(
                        *(task, length, index, name),
                        compression=compression,
                        score=value,
                        facts=facts(index),
                    )


def make_folder(folder: Path, records: Sequence[Record], **changes: Any) -> Path:
    """A results folder with these records, and what is changed of its run_meta.json."""
    folder.mkdir(parents=True)
    policies = dict.fromkeys(record.policy for record in records)
    meta = {
        "command": f"python scripts/eval.py --out {folder.name}",
        "config": {},
        "versions": {"torch": "2.13.0"},
        "git_revision": {"commit": "abc123", "dirty": True},
        "model": {"name": "meta-llama/Llama-3.1-8B-Instruct", "source": "hub", "dtype": "bfloat16"},
        "template": {"kind": "chat", "sha256": "1"},
        "essays": {"name": "bundled", "sha256": "0"},
        "data": {},
        "seed": 42,
        "policies": changes.pop("policies", None) or {name: config(name) for name in policies},
        "tasks": {task: {"metric": "match"} for task in dict.fromkeys(r.task for r in records)},
    }
    (folder / "run_meta.json").write_text(json.dumps(meta | changes))
    lines = [json.dumps(dataclasses.asdict(record)) + "\n" for record in records]
    (folder / "records.jsonl").write_text("".join(lines))
    return folder


def config(name: str) -> dict[str, Any] | None:
    found = policy(name.partition(":")[0], **CHANGES.get(name, {}))
    return None if found is None else dataclasses.asdict(found)
