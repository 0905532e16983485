"""The paper's ablation tables: the effect of one changed option, of the budget, of the refresh schedule."""

from __future__ import annotations

from typing import Any

from inertiakv.evals import paper

from .paired import paired_table, pairings
from .suites import INERTIAKV, Arm, Suite, changed_options
from .table import Table, interval, ordered, published, shown, task_name
from .tables import in_paper, score, score_columns, score_table


def swept(suite: Suite) -> dict[str, dict[Arm, Any]]:
    """By option: its value in each arm that is InertiaKV but for it, and in InertiaKV's own arms."""
    found: dict[str, dict[Arm, Any]] = {}
    unchanged: list[Arm] = []
    for arm in suite.arms:
        if (options := suite.options(arm)) is not None:
            changed = changed_options(options)
            if not changed:
                unchanged.append(arm)
            elif len(changed) == 1:
                ((option, value),) = changed.items()
                found.setdefault(option, {})[arm] = value
    return {option: arms | dict.fromkeys(unchanged, INERTIAKV[option]) for option, arms in found.items()}


def sweeps(suite: Suite) -> list[Table]:
    """A table for each option but refresh, which has one of differences."""
    return [_sweep(suite, option, arms) for option, arms in swept(suite).items() if option != "refresh"]


def _sweep(suite: Suite, option: str, values: dict[Arm, Any]) -> Table:
    columns = score_columns(suite)
    figures = {arm: in_paper(suite, arm) for arm in values}
    with_paper = any(figure is not None for figure in figures.values())
    rows = []
    for arm in sorted(values, key=lambda arm: (arm.size, ordered(values[arm]))):
        found = suite.estimates.get((arm, None))
        scores = [score(suite, arm, task) for task in columns.values()]
        rows.append([shown(values[arm]), arm.evicted, *scores, interval(found) if found else "-"])
        rows[-1] += [published(figures[arm])] * with_paper
    head = [option, "evicted", *columns, "95 % interval", *["paper"] * with_paper]
    note = f"inertiakv with another {option}, all else alike. The interval is the last score's."
    name = "Table 5: alpha" if option == "alpha" else f"Options: {option}"
    return score_table(f"{name}, {suite.title}", note, head, rows)


def compression(suite: Suite) -> Table | None:
    """Policies by budgets, of those that have several."""
    arms = {(arm.policy, arm.size): arm for arm in suite.arms if arm.size > (0, 0)}
    policies = [policy for policy in suite.setting.policies if sum(p == policy for p, _ in arms) > 1]
    if not policies:
        return None
    sizes = {arm.size: arm.evicted for arm in sorted(arms.values(), key=lambda arm: arm.size)}
    rows = [
        [p, *(score(suite, arms[p, size]) if (p, size) in arms else "-" for size in sizes)] for p in policies
    ]
    full = [f"{arm}: {score(suite, arm)}." for arm in suite.arms if arm.size == (0, 0)]
    note = " ".join(["By how much is evicted.", *full])
    return score_table(f"Table 7: compression, {suite.title}", note, ["rule", *sizes.values()], rows)


def cumulative(suite: Suite) -> Table | None:
    """Cumulative scoring minus the EMA, task by task."""
    summed, smoothed = suite.setting.policy("cumulative"), suite.setting.policy("inertiakv")
    if summed is None or smoothed is None:
        return None
    couples = [(a, a.at_its_budget(smoothed)) for a in suite.arms if a.policy == summed]
    tasks = score_columns(suite).values()
    lines = []
    for p in pairings(suite, [(a, b, task) for a, b in couples if b in suite.arms for task in tasks]):
        scores = [score(suite, p.other, p.task), score(suite, p.arm, p.task)]
        lines.append(([task_name(p.task) if p.task else "average", p.arm.evicted, *scores], p))
    title = f"Table 12: cumulative minus EMA, {suite.title}"
    head = ["task", "evicted", "EMA", "cumulative"]
    return paired_table(title, "Gains and losses by summing scores.", head, lines)


def lazy(suite: Suite) -> Table | None:
    """What scoring at fewer steps changes."""
    values = swept(suite).get("refresh", {})
    every_step = {arm.size: arm for arm, refresh in values.items() if refresh == INERTIAKV["refresh"]}
    order = sorted(values.keys() - every_step.values(), key=lambda arm: (arm.size, ordered(values[arm])))
    lines = []
    for pairing in pairings(suite, [(a, every_step[a.size], None) for a in order if a.size in every_step]):
        ours, theirs = in_paper(suite, pairing.arm), in_paper(suite, pairing.other)
        delta = "-" if ours is None or theirs is None else f"{ours - theirs:+.2f}"
        lines.append(([shown(values[pairing.arm]), pairing.arm.evicted, delta], pairing))
    note = f"Scoring at every r-th step, or once, minus scoring at every step. {paper.LAZY}"
    return paired_table(
        f"Table 14: lazy refresh, {suite.title}", note, ["refresh", "evicted", "paper"], lines
    )
