"""How far an evaluation is, and what came of it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from inertiakv.evals.records import Mean
from inertiakv.evals.reporting.table import aligned
from inertiakv.evals.rules import label
from inertiakv.scripts.cli.program import say

EVERY = 30
"""Seconds between two lines, where there is no terminal for a bar."""


class RecordBar:
    """Progress in records, with the time to go: a bar on a terminal, elsewhere a line from time to time."""

    def __init__(self, who: str) -> None:
        self.who = who

    def begin(self, done: int, total: int) -> None:
        self.start, self.total, self.first = time.monotonic(), total, done
        self.done, self.said = done, self.start
        # No smoothing: records come in batches, and rules differ in speed.
        self.bar = tqdm(
            total=total, initial=done, desc=self.who, unit=" records", disable=None, leave=False, smoothing=0
        )

    def draft(self, number: int, drafts: int) -> None:
        """For `on_draft=` of a decoder: while it decodes drafts, a bar would seem to stand still."""
        self.bar.set_postfix_str(f"rehearsing, draft {number} of {drafts}")

    def update(self) -> None:
        self.done += 1
        self.bar.set_postfix_str("", refresh=False)
        self.bar.update()
        now = time.monotonic()
        if self.bar.disable and (self.done == self.total or now - self.said >= EVERY):
            self.said = now
            say(f"{self.who}: {self.line(now - self.start)}")

    def line(self, seconds: float) -> str:
        rest = seconds / max(1, self.done - self.first) * (self.total - self.done)
        return f"{self.done:,} of {self.total:,} records, {_time(seconds)} gone, {_time(rest)} to go"

    def close(self) -> None:
        self.bar.close()


def note(text: str) -> None:
    """A line that leaves a bar in one piece."""
    with tqdm.external_write_mode(file=sys.stderr):
        say(text)


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def summary(means: Sequence[Mean], rules: Sequence[str]) -> str:
    """Tasks by rules, scores in percent, in as many tables below each other as the terminal's width takes."""
    rows: dict[str, dict[str, Mean]] = {}
    for mean in means:
        name = mean.task if mean.length is None else f"{mean.task} {mean.length:,}"
        rows.setdefault(name, {})[label(mean.policy, mean.compression, mean.budget)] = mean
    counts = [f"{next(iter(row.values())).n:,}" for row in rows.values()]
    left = [["task", *rows], ["n", *counts]]
    room = shutil.get_terminal_size((110, 24)).columns - sum(map(_width, left))
    tables: list[list[list[str]]] = []
    free = 0
    for rule in rules:
        column = [rule, *(f"{100 * row[rule].score:.1f}" for row in rows.values())]
        if not tables or _width(column) > free:
            tables.append([*left])
            free = room
        tables[-1].append(column)
        free -= _width(column)
    return "\n\n".join("\n".join(aligned([*zip(*table, strict=True)])) for table in tables)


def _width(column: Sequence[str]) -> int:
    """With the space beside it."""
    return max(map(len, column)) + 2
