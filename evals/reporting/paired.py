"""Rules against each other on the same samples, as tables and as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inertiakv.evals.statistics import Comparison, holm

from .suites import Arm, Suite
from .table import Table
from .text import interval, p_value, signed, task_name

HEAD = ("difference", "95 % interval", "pairs", "wins", "ties", "losses", "t", "p", "p (Holm)")


@dataclass(frozen=True)
class Pairing:
    """One rule against another, on a task or, None, on the average over tasks."""

    suite: Suite
    arm: Arm
    other: Arm
    task: str | None
    result: Comparison
    adjusted: float
    """p by Holm's method, for all that are compared together."""

    @property
    def cells(self) -> list[str]:
        """As `HEAD` has them."""
        r = self.result
        counts = (self._pairs(), str(r.wins), str(r.ties), str(r.losses))
        t = "-" if math.isnan(r.t) else f"{r.t:.2f}"
        return [signed(r.difference), interval(r), *counts, t, p_value(r.p), p_value(self.adjusted)]

    def _pairs(self) -> str:
        tasks = self.suite.tasks if self.task is None else [self.task]
        every, used = sum(len(self.suite.samples[t]) for t in tasks), len(self.suite.pairs(*self._arms))
        pairs = str(self.result.pairs) if self.result.pairs == every else f"{self.result.pairs} of {every}"
        return pairs if self.task or used == len(tasks) else f"{pairs} ({used} of {len(tasks)} tasks)"

    @property
    def _arms(self) -> tuple[Arm, Arm, str | None]:
        return self.arm, self.other, self.task


def pairings(suite: Suite, wanted: Sequence[tuple[Arm, Arm, str | None]]) -> list[Pairing]:
    """One family of comparisons, but for those without a common sample."""
    results = [suite.compare(*one) for one in wanted]
    found = [(one, result) for one, result in zip(wanted, results, strict=True) if result is not None]
    adjusted = holm([result.p for _, result in found])
    return [Pairing(suite, *one, result, p) for (one, result), p in zip(found, adjusted, strict=True)]


def against(suite: Suite, policy: str, *, by_task: bool = False) -> list[Pairing]:
    """Every other rule against this policy, at the same budget where there is such a one."""
    couples = [(arm, suite.partner(arm, policy)) for arm in suite.arms if arm.policy != policy]
    tasks = suite.tasks if by_task else [None]
    return pairings(
        suite, [(arm, other, task) for arm, other in couples if other is not None for task in tasks]
    )


def paired_table(
    title: str, note: str, head: Sequence[str], lines: Sequence[tuple[list[str], Pairing]]
) -> Table:
    """A table of one family: cells of one's own, with their heads, before those of each pairing."""
    count = len(lines)
    note += (
        f" Percentage points. {count} comparison{'s' * (count != 1)} in this table: p (Holm) allows for all."
    )
    if any(math.isnan(pairing.result.p) for _, pairing in lines):
        note += " No t-test (-) where all differences are equal, or a task has a single pair."
    return Table(title, note, [*head, *HEAD], [[*cells, *pairing.cells] for cells, pairing in lines])


def against_table(suite: Suite, policy: str, *, by_task: bool = False) -> Table | None:
    """None where there is nothing to compare."""
    if by_task and len(suite.tasks) == 1:
        return None  # the average is the task
    found = against(suite, policy, by_task=by_task)
    if not found:
        return None
    lines = []
    for pairing in found:
        cells = [pairing.arm.policy, pairing.arm.evicted, str(pairing.other)]
        lines.append(([*cells, task_name(pairing.task)] if pairing.task else cells, pairing))
    note = f"Each rule minus {policy}, on the samples that both have answered"
    note += (
        "." if by_task or len(suite.tasks) == 1 else ": the mean over tasks, of which each weighs the same."
    )
    what = ", task by task" if by_task else ""
    head = ["rule", "evicted", "against", *["task"] * by_task]
    return paired_table(f"Paired with {policy}{what}: {suite.title}", note, head, lines)
