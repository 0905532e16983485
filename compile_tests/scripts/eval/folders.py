"""What the tests of scripts/eval.py ask for, and what they read of its folders."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compile_tests.scripts.test_decode_cli import Result
from inertiakv.evals.records import read_records

ROOT = Path(__file__).resolve().parents[3]
ARGV = ("--tasks", "made,rows", "--lengths", "130,90", "--samples", 3)
ARGV += ("--policies", "full,lazy2,snapkv:window=8", "--compression", "0.5", "--batch", 2)
MADE = "--tasks made --lengths 100 --samples 2"

Cli = Callable[..., Result]


def contents(folder: Path) -> dict[Any, dict[str, Any]]:
    """The records of a folder, each of which is there once, without what depends on the machine and on a
    batch's other rows."""
    unlike = dict.fromkeys(("seconds", "cache_bytes"))
    return {record.key: dataclasses.asdict(record) | unlike for record in read_records(folder)}


def run_meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run_meta.json").read_text())
