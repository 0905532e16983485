"""Cells that several tables have, and what their marks mean."""

from __future__ import annotations

from collections.abc import Sequence

from inertiakv.evals import paper

from .configs import named
from .suites import Arm, Suite
from .text import percent, task_name

SOME_MISSING = "†: not all samples, see the missing ones."


def columns_of(suite: Suite) -> list[tuple[str, str | None]]:
    """Titles of the tasks, and of the average where there are several; a lone one names its metric."""
    if len(suite.tasks) == 1:
        (task,) = suite.tasks
        return [(f"{task_name(task)} ({suite.setting.metrics[task]})", None)]
    return [*((task_name(task), task) for task in suite.tasks), ("average", None)]


def metrics(suite: Suite) -> str:
    tasks: dict[str, list[str]] = {}
    for task in suite.tasks:
        tasks.setdefault(suite.setting.metrics[task], []).append(task_name(task))
    if len(tasks) == 1:
        return f"Metric: {next(iter(tasks))}."
    return f"Metrics: {'; '.join(f'{metric}: ' + ', '.join(of) for metric, of in tasks.items())}."


def cell(suite: Suite, arm: Arm, task: str | None = None) -> str:
    found = suite.estimates.get((arm, task))
    if found is None:
        return "-"
    return percent(found.mean) + "†" * bool(suite.missing(arm, task))


def in_paper(suite: Suite, arm: Arm, task: str | None = None) -> float | None:
    """The paper's figure for this model, rule and task or average, at its compression."""
    model, rule = paper.model_of(suite.setting.model), suite.rule(arm)
    if model is None or (rule is not None and arm.compression != paper.COMPRESSION):
        return None
    figures = paper.TASKS.get((model, task)) if task else paper.AVERAGES.get((model, suite.benchmark))
    if task is None and not paper.is_whole(suite.benchmark, set(suite.tasks)):
        return None
    return next((value for name, value in (figures or {}).items() if named(name) == rule), None)


def noted(note: str, rows: Sequence[Sequence[str]]) -> str:
    """With what the rows' marks mean."""
    marked = any(cell.endswith("†") for row in rows for cell in row)
    return f"{note} {SOME_MISSING}".strip() if marked else note
