"""The mean over prompts as tables, for a terminal and as Markdown."""

from __future__ import annotations

import math
from typing import Any

from inertiakv.evals.reporting.table import Table

from .analysis import average

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
"""Columns of the first table: a statistic, its factor (100 for percent), and its decimals."""
STABILITY_NOTE = (
    "As in Table 13 of arXiv 2609.03515 (raw churn 34 %, EMA churn 8 %, at most one change in 75 % of "
    "steps). Sets are the top B of all tokens, by a step's scores (raw) and by utility (EMA, whatever "
    "the rule). *Raw evicted*: of the raw set, what a cache that takes no token back would have lost. "
    "*Margin*: of utilities at the edge of the set, in standard deviations. *Rank change*: of tokens "
    "that stay, relative to the largest possible. Churn, shares and rank change in percent."
)
AGREEMENT_NOTE = (
    "Each scorer against attention, layer by layer: Spearman correlation of the scores / Jaccard of the "
    "top B, means over steps."
)
JACCARD_NOTE = (
    "Of the layers' own top B, mean over steps and layers / of the sets by utility, mean over steps."
)
LAYERS_NOTE = (
    "Percent of the margin by which utilities of the set exceed the others', from each layer and from "
    "the steps before / percent of the set that would be other tokens without it."
)


def tables(mean: dict[str, Any]) -> list[Table]:
    """Every table that the numbers are there for."""
    rules, scorers = mean["rules"].items(), mean["spectrum"]
    rows = [[label, *(_cell(row[key], *form) for key, *form in COLUMNS.values())] for label, row in rules]
    made = [Table("Stability of the sets", STABILITY_NOTE, ["rule", *COLUMNS], rows)]
    if len(scorers) > 1:
        rows = _by_layer([(s["spearman"], s["jaccard"]) for s in scorers.values()])
        means = [_pair(average(s["spearman"]), average(s["jaccard"])) for s in scorers.values()]
        rows.append(["mean", *means])
        made.append(Table("Correlation with attention", AGREEMENT_NOTE, ["layer", *scorers], rows))
        layers, ema = mean["jaccard"]["layers"], mean["jaccard"]["ema"]
        rows = [[a, *(_pair(layers[a][b], ema[a][b]) for b in layers)] for a in layers]
        made.append(Table("Jaccard between scorers", JACCARD_NOTE, ["scorer", *layers], rows))
    votes = mean["layers"]
    rows = _by_layer([(vote["margin_share"], vote["decided"]) for vote in votes.values()], 100, 1)
    rows[-1][0] = "before"
    return [*made, Table("Which vote decides", LAYERS_NOTE, ["layer", *votes], rows)]


def page(report: dict[str, Any]) -> str:
    """The tables as Markdown, and what they are of."""
    model, prompts = report["model"], report["prompts"]
    sizes = [f"{p['tokens']:,} tokens, B = {p['budget']:,}, {p['steps']:,} steps" for p in prompts]
    facts = [
        f"* `{report['command']}`",
        f"* {model['name']} ({model['source']}), {model['dtype']}",
        f"* {'prompt' if len(sizes) == 1 else 'prompts'} of {'; '.join(sizes)}",
    ]
    made = (table.markdown() for table in tables(report["mean"]))
    return "\n\n".join(["# Eviction rules compared", "\n".join(facts), *made]) + "\n"


def _by_layer(columns: list[tuple[list[float], list[float]]], *form: int) -> list[list[str]]:
    """A row for each layer, with a pair for each column."""
    pairs = ([_pair(a, b, *form) for a, b in zip(*column, strict=True)] for column in columns)
    return [[str(layer), *row] for layer, row in enumerate(zip(*pairs, strict=True))]


def _cell(value: float, factor: int = 1, decimals: int = 3) -> str:
    return "-" if math.isnan(value) else f"{factor * value:.{decimals}f}"


def _pair(a: float, b: float, *form: int) -> str:
    return f"{_cell(a, *form)} / {_cell(b, *form)}"
