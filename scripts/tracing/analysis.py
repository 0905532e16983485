"""From runs to numbers: what `trace.json` says of a prompt, and the mean over prompts.

Shape letters: T steps, L layers, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from inertiakv import EvictionConfig
from inertiakv.evals import diagnostics as dx

from .runs import REFERENCE, Rules, Run


def analyse(rules: Rules, runs: dict[EvictionConfig, Run]) -> dict[str, Any]:
    """The statistics of one prompt: of each rule's own run, in which every token was kept."""
    stability = {rule: dx.stability(run.trace, run.budget) for rule, run in runs.items()}
    layers = {}
    for label, rule in rules.distinct.items():
        profile = dx.layer_profile(runs[rule].trace, rule, runs[rule].budget)
        layers[label] = {
            "margin_share": profile.margin_share_L.tolist(),
            "decided": profile.decided_L.tolist(),
        }
    scorers = {name: runs[rule] for name, rule in rules.scorers.items()}
    return {
        "rules": {label: stability[rule] for label, rule in rules.labelled.items()},
        "layers": layers,
        "spectrum": {name: _agreement(scorers[REFERENCE], run) for name, run in scorers.items()},
        "jaccard": {
            "layers": _pairs(scorers, lambda run: dx.layer_sets(run.trace, run.budget)),
            "ema": _pairs(scorers, lambda run: dx.ema_sets(run.trace, run.budget)),
        },
    }


def churn_series(run: Run) -> dict[str, dict[str, list[float]]]:
    """Churn step by step. Raw sets have the steps that took scores, each set against the one before it."""
    raw_TP, ema_TP = dx.raw_sets(run.trace.scored(), run.budget), dx.ema_sets(run.trace, run.budget)
    scored = (run.trace.scored_T.nonzero()[1:, 0] + 1).tolist()
    return {
        "raw": {"step": scored, "churn": dx.churn(raw_TP).tolist()},
        "ema": {"step": list(range(2, run.trace.steps + 1)), "churn": dx.churn(ema_TP).tolist()},
    }


def _agreement(reference: Run, run: Run) -> dict[str, list[float]]:
    return {
        "spearman": dx.layer_spearman(reference.trace, run.trace).tolist(),
        "jaccard": dx.layer_jaccard(reference.trace, run.trace, run.budget).tolist(),
    }


def _pairs(runs: dict[str, Run], sets_of: Callable[[Run], Tensor]) -> dict[str, dict[str, float]]:
    """Mean Jaccard of the sets of every two runs, all of the same steps."""
    sets = {name: sets_of(run) for name, run in runs.items()}
    return {a: {b: dx.jaccard(sets[a], sets[b]).nanmean().item() for b in sets} for a in sets}


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
    """For JSON, which knows no NaN: null instead, and six decimals."""
    if isinstance(report, dict):
        return {key: plain(value) for key, value in report.items()}
    if isinstance(report, list):
        return [plain(value) for value in report]
    if isinstance(report, float):
        return round(report, 6) if math.isfinite(report) else None
    return report
