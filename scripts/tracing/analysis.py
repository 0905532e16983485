"""From runs to numbers: what `trace.json` says of a prompt, and the mean over prompts.

Shape letters: T steps, L layers, P positions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inertiakv import EvictionConfig
from inertiakv.evals import diagnostics as dx

from .runs import REFERENCE, Rules, Run


def analyse(rules: Rules, runs: dict[EvictionConfig, Run]) -> dict[str, Any]:
    """What runs over one prompt say, each rule's own, in which every token was kept."""
    statistics = {rule: dataclasses.asdict(dx.stability(r.trace, r.budget)) for rule, r in runs.items()}
    scorers = {name: runs[rule] for name, rule in rules.scorers.items()}
    return {
        "rules": {label: statistics[rule] for label, rule in rules.labelled.items()},
        "layers": {label: _layers(runs[rule]) for label, rule in rules.distinct.items()},
        "spectrum": {name: _spectrum(scorers[REFERENCE], run) for name, run in scorers.items()},
        "jaccard": {
            "layers": _pairs(scorers, lambda run: dx.layer_sets(run.trace, run.budget)),
            "ema": _pairs(scorers, lambda run: dx.ema_sets(run.trace, run.budget)),
        },
    }


def churn_series(run: Run) -> dict[str, dict[str, list[float]]]:
    """Churn step by step. Raw sets have the steps which took scores, each set against the one before it."""
    sets = {"raw": dx.raw_sets(run.trace.scored(), run.budget), "ema": dx.ema_sets(run.trace, run.budget)}
    steps = {"raw": run.trace.scored_T.nonzero()[1:, 0] + 1, "ema": torch.arange(2, run.trace.steps + 1)}
    return {
        name: {"step": steps[name].tolist(), "churn": dx.churn(set_TP).tolist()}
        for name, set_TP in sets.items()
    }


def _layers(run: Run) -> dict[str, list[float]]:
    """The layers, and last the step before."""
    profile = dx.layer_profile(run.trace, run.rule, run.budget)
    return {"margin_share": profile.margin_share_L.tolist(), "decided": profile.decided_L.tolist()}


def _spectrum(reference: Run, run: Run) -> dict[str, list[float]]:
    return {
        "spearman": dx.layer_spearman(reference.trace, run.trace).tolist(),
        "jaccard": dx.layer_jaccard(reference.trace, run.trace, run.budget).tolist(),
    }


def _pairs(runs: dict[str, Run], sets_of: Callable[[Run], Tensor]) -> dict[str, dict[str, float]]:
    """Mean Jaccard of the sets of every two runs."""
    for run in runs.values():
        dx.check_same_steps(next(iter(runs.values())).trace, run.trace)
    sets = {name: sets_of(run) for name, run in runs.items()}
    table: dict[str, dict[str, float]] = {name: {} for name in sets}
    for a, b in itertools.combinations_with_replacement(sets, 2):
        table[a][b] = table[b][a] = dx.jaccard(sets[a], sets[b]).nanmean().item()
    return table


def average(reports: Sequence[Any]) -> Any:
    """The mean, number by number, of reports of one form; of what is not NaN."""
    first = reports[0]
    if isinstance(first, dict):
        return {key: average([report[key] for report in reports]) for key in first}
    if isinstance(first, list):
        return [average(values) for values in zip(*reports, strict=True)]
    known = [value for value in reports if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def plain(report: Any) -> Any:
    """For JSON, which knows no NaN: null instead, and no more digits than mean something."""
    if isinstance(report, dict):
        return {key: plain(value) for key, value in report.items()}
    if isinstance(report, list):
        return [plain(value) for value in report]
    if isinstance(report, float):
        return round(report, 6) if math.isfinite(report) else None
    return report
