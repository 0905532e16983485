"""How far an evaluation is, and what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from inertiakv.evals.records import Mean
from inertiakv.evals.reporting.table import aligned
from inertiakv.evals.rules import label
from inertiakv.scripts.cli.program import say

EVERY = 30
"""Seconds between two lines, where there is no terminal for a bar."""


def record_bar(who: str, done: int, total: int) -> tqdm:
    """Progress in records. Without smoothing: they come in batches, and rules differ in speed."""
    every = 0.1 if sys.stderr.isatty() else EVERY
    return tqdm(total=total, initial=done, desc=who, unit=" records", smoothing=0, mininterval=every)


def note(text: str) -> None:
    """A line that leaves a bar in one piece."""
    with tqdm.external_write_mode(file=sys.stderr):
        say(text)


def summary(means: Sequence[Mean], rules: Sequence[str]) -> str:
    """A line for each rule, a column for each task; scores in percent."""
    columns: dict[str, dict[str, Mean]] = {}
    for mean in means:
        name = mean.task if mean.length is None else f"{mean.task} {mean.length:,}"
        columns.setdefault(name, {})[label(mean.policy, mean.compression, mean.budget)] = mean
    counts = (f"{next(iter(column.values())).n:,}" for column in columns.values())
    scores = ([rule, *(f"{100 * of[rule].score:.1f}" for of in columns.values())] for rule in rules)
    return "\n".join(aligned([["rule", *columns], ["samples", *counts], *scores]))
