"""The paper's tables of what is changed in a rule: an option, the budget, the schedule."""

from __future__ import annotations

from typing import Any

from inertiakv.evals import paper

from .cells import cell, columns_of, in_paper, noted
from .configs import INERTIAKV, changes
from .paired import paired_table, pairings
from .suites import Arm, Suite
from .table import Table
from .text import interval, ordered, published, shown, task_name

NUMBERED = {"alpha": "Table 5: alpha"}
"""Sweeps that the paper has a table of. Others are named by what is changed."""


def swept(suite: Suite) -> dict[str, dict[Arm, Any]]:
    """For each option that was changed alone: its value in every arm that is InertiaKV but for it."""
    found: dict[str, dict[Arm, Any]] = {}
    same: list[Arm] = []
    for arm in suite.arms:
        if (rule := suite.rule(arm)) is None:
            continue
        changed = changes(rule)
        if not changed:
            same.append(arm)
        elif len(changed) == 1:
            ((field, value),) = changed.items()
            found.setdefault(field, {})[arm] = value
    return {field: arms | dict.fromkeys(same, INERTIAKV[field]) for field, arms in found.items()}


def sweeps(suite: Suite) -> list[Table]:
    """A table for each option. Refresh has one of differences."""
    return [_sweep(suite, field, values) for field, values in swept(suite).items() if field != "refresh"]


def _sweep(suite: Suite, field: str, values: dict[Arm, Any]) -> Table:
    columns = columns_of(suite)
    figures = {arm: in_paper(suite, arm) for arm in values}
    with_paper = any(f is not None for f in figures.values())
    rows = []
    for arm in sorted(values, key=lambda arm: (arm.size, ordered(values[arm]))):
        found = suite.estimates.get((arm, None))
        rows.append(
            [
                *(shown(values[arm]), arm.evicted, *(cell(suite, arm, task) for _, task in columns)),
                interval(found) if found else "-",
                *[published(figures[arm])] * with_paper,
            ]
        )
    head = [field, "evicted", *(title for title, _ in columns), "95 % interval", *["paper"] * with_paper]
    note = f"inertiakv with another {field}, all else alike. The interval is the last score's."
    title = f"{NUMBERED.get(field, f'Options: {field}')}, {suite.title}"
    return Table(title, noted(note, rows), head, rows)


def compression(suite: Suite) -> Table | None:
    """Rules by budgets, of those that have several."""
    arms = {(arm.policy, arm.size): arm for arm in suite.arms if arm.size > (0, 0)}
    policies = [policy for policy in suite.setting.rules if sum(p == policy for p, _ in arms) > 1]
    if not policies:
        return None
    sizes = {arm.size: arm.evicted for arm in sorted(arms.values(), key=lambda arm: arm.size)}
    rows = [
        [p, *(cell(suite, arms[p, size]) if (p, size) in arms else "-" for size in sizes)] for p in policies
    ]
    whole = [f"{arm}: {cell(suite, arm)}." for arm in suite.arms if arm.size == (0, 0)]
    note = " ".join(["By how much is evicted.", *whole])
    head = ["rule", *sizes.values()]
    return Table(f"Table 7: compression, {suite.title}", noted(note, rows), head, rows)


def cumulative(suite: Suite) -> Table | None:
    """Cumulative scoring minus the EMA, task by task."""
    summed, smoothed = suite.setting.policy("cumulative"), suite.setting.policy("inertiakv")
    if summed is None or smoothed is None:
        return None
    couples = [(a, a.at_its_budget(smoothed)) for a in suite.arms if a.policy == summed]
    tasks = [task for _, task in columns_of(suite)]
    found = pairings(suite, [(a, b, task) for a, b in couples if b in suite.arms for task in tasks])
    if not found:
        return None
    lines = [
        (
            [
                *(task_name(p.task) if p.task else "average", p.arm.evicted),
                *(cell(suite, p.other, p.task), cell(suite, p.arm, p.task)),
            ],
            p,
        )
        for p in found
    ]
    note = noted("Gains and losses by summing scores.", [cells for cells, _ in lines])
    head = ["task", "evicted", "EMA", "cumulative"]
    return paired_table(f"Table 12: cumulative minus EMA, {suite.title}", note, head, lines)


def lazy(suite: Suite) -> Table | None:
    """What scoring at fewer steps changes."""
    values = swept(suite).get("refresh", {})
    every_step = {arm.size: arm for arm, refresh in values.items() if refresh == INERTIAKV["refresh"]}
    order = sorted(values.keys() - every_step.values(), key=lambda arm: (arm.size, ordered(values[arm])))
    found = pairings(suite, [(a, every_step[a.size], None) for a in order if a.size in every_step])
    if not found:
        return None
    lines = []
    for pairing in found:
        ours, theirs = in_paper(suite, pairing.arm), in_paper(suite, pairing.other)
        delta = "-" if ours is None or theirs is None else f"{ours - theirs:+.2f}"
        lines.append(([shown(values[pairing.arm]), pairing.arm.evicted, delta], pairing))
    note = f"Scoring at every r-th step, or once, minus scoring at every step. {paper.LAZY}"
    title = f"Table 14: lazy refresh, {suite.title}"
    return paired_table(title, note, ["refresh", "evicted", "paper"], lines)
