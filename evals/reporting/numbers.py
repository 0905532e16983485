"""A report's figures as one object for JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from .paired import Pairing, against
from .runs import Run
from .suites import Arm, Suite


def numbers(
    runs: Sequence[Run], suites: Sequence[Suite], notes: Sequence[str], reference: str
) -> dict[str, Any]:
    """Every mean and every comparison, as parts of 1. Comparisons of one suite with one rule, of averages or
    of single tasks, are a family of Holm's."""
    scores, comparisons = [], []
    for suite in suites:
        for (arm, task), found in suite.estimates.items():
            gone = len(suite.missing(arm, task))
            scores.append({**_place(suite, arm, task), **dataclasses.asdict(found), "missing": gone})
        for policy in suite.setting.references(reference):
            for by_task in (False, True):
                comparisons += [_comparison(pair) for pair in against(suite, policy, by_task=by_task)]
    about = [{"folder": str(run.folder), "records": len(run.records), **run.meta} for run in runs]
    return {"runs": about, "notes": list(notes), "scores": scores, "comparisons": comparisons}


def _place(suite: Suite, arm: Arm, task: str | None) -> dict[str, Any]:
    where = {
        "setting": suite.setting.name,
        "benchmark": suite.benchmark,
        "length": suite.length,
        "task": task,
    }
    return {**where, **dataclasses.asdict(arm)}


def _comparison(pairing: Pairing) -> dict[str, Any]:
    figures = {**dataclasses.asdict(pairing.result), "p_holm": pairing.adjusted}
    return {
        **_place(pairing.suite, pairing.arm, pairing.task),
        "against": dataclasses.asdict(pairing.other),
        **{name: None if math.isnan(value) else value for name, value in figures.items()},
    }
