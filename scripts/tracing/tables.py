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
    rules = mean["rules"].items()
    cells = [[label, *(_cell(row[key], *form) for key, *form in COLUMNS.values())] for label, row in rules]
    made = [Table("Stability of the sets", STABILITY_NOTE, ["rule", *COLUMNS], cells)]
    if len(mean["spectrum"]) > 1:
        made += [_agreement(mean["spectrum"]), _jaccard(mean["jaccard"])]
    return [*made, _layers(mean["layers"])]


def page(report: dict[str, Any]) -> str:
    """The tables as Markdown, and what they are of."""
    model, prompts = report["model"], report["prompts"]
    sizes = [f"{p['tokens']:,} tokens, B = {p['budget']:,}, {p['steps']:,} steps" for p in prompts]
    facts = [
        f"* `{report['command']}`",
        f"* {model['name']} ({model['source']}), {model['dtype']}",
        f"* {'prompt' if len(sizes) == 1 else 'prompts'} of {'; '.join(sizes)}",
    ]
    parts = [
        "# Eviction rules compared",
        "\n".join(facts),
        *(table.markdown() for table in tables(report["mean"])),
    ]
    return "\n\n".join(parts) + "\n"


def _agreement(scorers: dict[str, dict[str, list[float]]]) -> Table:
    layers = range(len(next(iter(scorers.values()))["jaccard"]))
    columns = scorers.values()
    rows = [[str(i), *(_pair(s["spearman"][i], s["jaccard"][i]) for s in columns)] for i in layers]
    means = [_pair(average(s["spearman"]), average(s["jaccard"])) for s in columns]
    head = ["layer", *scorers]
    return Table("Correlation with attention", AGREEMENT_NOTE, head, [*rows, ["mean", *means]])


def _jaccard(jaccard: dict[str, dict[str, dict[str, float]]]) -> Table:
    layers, ema = jaccard["layers"], jaccard["ema"]
    rows = [[a, *(_pair(layers[a][b], ema[a][b]) for b in layers)] for a in layers]
    return Table("Jaccard between scorers", JACCARD_NOTE, ["scorer", *layers], rows)


def _layers(rules: dict[str, dict[str, list[float]]]) -> Table:
    columns = [list(zip(r["margin_share"], r["decided"], strict=True)) for r in rules.values()]
    names = [*map(str, range(len(columns[0]) - 1)), "before"]
    rows = [[name, *(_pair(*column[i], 100, 1) for column in columns)] for i, name in enumerate(names)]
    return Table("Which vote decides", LAYERS_NOTE, ["layer", *rules], rows)


def _cell(value: float, factor: int = 1, decimals: int = 3) -> str:
    return "-" if math.isnan(value) else f"{factor * value:.{decimals}f}"


def _pair(a: float, b: float, *form: int) -> str:
    return f"{_cell(a, *form)} / {_cell(b, *form)}"
