"""The mean over prompts as tables, for a terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from inertiakv.evals.reporting.table import Table

COLUMNS = {
    "raw churn": ("raw_churn", 100, 1),
    "EMA churn": ("ema_churn", 100, 1),
    "raw/EMA Jaccard": ("raw_ema_jaccard", 1, 3),
    "raw evicted": ("raw_evicted", 100, 1),
    "at most 1 change": ("at_most_one_change", 100, 1),
    "margin": ("boundary_margin", 1, 4),
    "entropy": ("score_entropy", 1, 3),
    "rank change": ("rank_changes", 100, 1),
}
"""Columns of the first table: a statistic, by what it is multiplied (100 for percent), and its decimals."""


def tables(mean: dict[str, Any]) -> list[Table]:
    """Every table that the numbers are there for."""
    made = [stability(mean["rules"])]
    if len(mean["spectrum"]) > 1:
        made += [spectrum(mean["spectrum"]), matrix(mean["jaccard"])]
    return [*made, layers(mean["layers"])]


def page(report: dict[str, Any], made: Sequence[Table]) -> str:
    """The tables as Markdown, and what they are of."""
    model, prompts = report["model"], report["prompts"]
    sizes = [f"{p['tokens']:,} tokens, B = {p['budget']:,}, {p['steps']:,} steps" for p in prompts]
    facts = [
        f"* `{report['command']}`",
        f"* {model['name']} ({model['source']}), {model['dtype']}",
        f"* {'prompt' if len(sizes) == 1 else 'prompts'} of {'; '.join(sizes)}",
    ]
    parts = ["# Eviction rules compared", "\n".join(facts), *(table.markdown() for table in made)]
    return "\n\n".join(parts) + "\n"


def stability(rules: dict[str, dict[str, float]]) -> Table:
    note = (
        "As in Table 13 of arXiv 2609.03515 (raw churn 34 %, EMA churn 8 %, at most one change in 75 % of "
        "steps). Sets are the top B of all tokens, by a step's scores (raw) and by utility (EMA, whatever "
        "the rule). *Raw evicted*: of the raw set, what a cache that takes no token back would have lost. "
        "*Margin*: of utilities at the edge of the set, in standard deviations. *Rank change*: of tokens "
        "that stay, relative to the largest possible. Churn, shares and rank change in percent."
    )
    rows = [
        [label, *(_cell(statistics[name], *form) for name, *form in COLUMNS.values())]
        for label, statistics in rules.items()
    ]
    return Table("Stability of the sets", note, ["rule", *COLUMNS], rows)


def spectrum(scorers: dict[str, dict[str, list[float]]]) -> Table:
    note = (
        "Each scorer against attention, layer by layer: Spearman correlation of the scores / Jaccard of the "
        "top B, means over steps."
    )
    columns = {name: list(zip(s["spearman"], s["jaccard"], strict=True)) for name, s in scorers.items()}
    count = len(next(iter(columns.values())))
    rows = [[str(i), *(_pair(*column[i]) for column in columns.values())] for i in range(count)]
    means = [_pair(_mean([x for x, _ in c]), _mean([y for _, y in c])) for c in columns.values()]
    return Table("Correlation with attention", note, ["layer", *columns], [*rows, ["mean", *means]])


def matrix(jaccard: dict[str, dict[str, dict[str, float]]]) -> Table:
    note = "Of the layers' own top B, mean over steps and layers / of the sets by utility, mean over steps."
    names = list(jaccard["layers"])
    rows = [[a, *(_pair(jaccard["layers"][a][b], jaccard["ema"][a][b]) for b in names)] for a in names]
    return Table("Jaccard between scorers", note, ["scorer", *names], rows)


def layers(rules: dict[str, dict[str, list[float]]]) -> Table:
    note = (
        "Percent of the margin by which utilities of the set exceed the others', from each layer and from "
        "the steps before / percent of the set that would be other tokens without it."
    )
    columns = [list(zip(r["margin_share"], r["decided"], strict=True)) for r in rules.values()]
    names = [*map(str, range(len(columns[0]) - 1)), "before"]
    rows = [[name, *(_pair(*column[i], 100, 1) for column in columns)] for i, name in enumerate(names)]
    return Table("Which vote decides", note, ["layer", *rules], rows)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _cell(value: float, factor: int = 1, decimals: int = 3) -> str:
    return "-" if math.isnan(value) else f"{factor * value:.{decimals}f}"


def _pair(a: float, b: float, *form: int) -> str:
    return f"{_cell(a, *form)} / {_cell(b, *form)}"
