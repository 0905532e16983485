"""Policies against each other on the same samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inertiakv.evals.statistics import Comparison, compare, holm

from .suites import Arm, Suite
from .table import Table, interval, p_value, signed, task_name
from .tables import SOME_MISSING

HEAD = ("difference", "95 % interval", "pairs", "wins", "ties", "losses", "t", "p", "p (Holm)")


@dataclass(frozen=True)
class Pairing:
    """One arm minus another, on a task or, None, on the average over tasks."""

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
        t = "-" if math.isnan(r.t) else f"{r.t:.2f}"
        counts = [self._pairs(), *map(str, (r.wins, r.ties, r.losses))]
        return [signed(r.difference), interval(r), *counts, t, p_value(r.p), p_value(self.adjusted)]

    def _pairs(self) -> str:
        tasks = self.suite.tasks if self.task is None else [self.task]
        total = sum(len(self.suite.samples[task]) for task in tasks)
        used = len(self.suite.differences(self.arm, self.other, self.task))
        pairs = str(self.result.pairs) if self.result.pairs == total else f"{self.result.pairs} of {total}"
        return pairs if self.task or used == len(tasks) else f"{pairs} ({used} of {len(tasks)} tasks)"


def pairings(suite: Suite, wanted: Sequence[tuple[Arm, Arm, str | None]]) -> list[Pairing]:
    """One family of comparisons, but for those without a common sample."""
    found = [(one, compare(strata)) for one in wanted if (strata := suite.differences(*one))]
    adjusted = holm([result.p for _, result in found])
    return [Pairing(suite, *one, result, p) for (one, result), p in zip(found, adjusted, strict=True)]


def against(suite: Suite, policy: str, *, by_task: bool = False) -> list[Pairing]:
    """Every other policy against this one, at the same budget where it has that."""
    couples = [(arm, suite.partner(arm, policy)) for arm in suite.arms if arm.policy != policy]
    tasks = suite.tasks if by_task else [None]
    return pairings(suite, [(arm, other, task) for arm, other in couples if other for task in tasks])


def paired_table(
    title: str, note: str, head: Sequence[str], lines: Sequence[tuple[list[str], Pairing]]
) -> Table | None:
    """A table of one family: cells of one's own, with their heads, before those of each pairing. None where
    there is nothing to compare."""
    if not lines:
        return None
    if any(cell.endswith("†") for cells, _ in lines for cell in cells):
        note += f" {SOME_MISSING}"
    count = len(lines)
    note += (
        f" Percentage points. {count} comparison{'s' * (count != 1)} in this table: p (Holm) allows for all."
    )
    if any(math.isnan(pairing.result.p) for _, pairing in lines):
        note += " No t-test (-) where all differences are equal, or a task has a single pair."
    return Table(title, note, [*head, *HEAD], [[*cells, *pairing.cells] for cells, pairing in lines])


def against_table(suite: Suite, policy: str, *, by_task: bool = False) -> Table | None:
    if by_task and len(suite.tasks) == 1:
        return None  # the average is the task
    lines = []
    for pairing in against(suite, policy, by_task=by_task):
        cells = [pairing.arm.policy, pairing.arm.evicted, str(pairing.other)]
        lines.append(([*cells, task_name(pairing.task)] if pairing.task else cells, pairing))
    averaged = not by_task and len(suite.tasks) > 1
    note = f"Each rule minus {policy}, on the samples that both have answered"
    note += ": the mean over tasks, of which each weighs the same." if averaged else "."
    title = f"Paired with {policy}{', task by task' * by_task}: {suite.title}"
    return paired_table(title, note, ["rule", "evicted", "against", *["task"] * by_task], lines)
