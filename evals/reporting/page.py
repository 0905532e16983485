"""The report: one page of Markdown, with its pictures beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from inertiakv.evals.paper import model_of
from inertiakv.evals.statistics import RESAMPLES

from . import ablations, figures, plots, tables
from .paired import against_table
from .plots import Picture
from .suites import Run, Setting, Suite
from .table import Table

READING = (
    "Scores are percent. An average is over tasks, of which each weighs the same; a rule that has not "
    "been asked all of them has none. Empty answers count as wrong. Kept tokens are those in the cache "
    "at the end. Token/s: tokens of answers by seconds from the end of the prompt on, with its eviction and "
    "drafts, while other things may have run: not a measurement of speed. Cache MB: K and V as allocated for "
    "a row, with room for its answer, rounded up to blocks of slots. Tables with a number have the form of "
    "the paper's (arXiv 2609.03515).",
    f"Intervals are 95 % bootstrap percentile intervals, from {RESAMPLES:,} resamples of the samples "
    "within each task: they say how far other samples might lead, not other models or prompts, and "
    "where all samples score alike they have no width. Of fewer than some ten samples they are too narrow: "
    "then go by the t-test. Comparisons are of the same samples: the mean "
    "difference with its paired bootstrap interval, the paired t-test (over several tasks with each "
    "task's own variance), and p adjusted by Holm's method for the number of comparisons in the table.",
)
PAPER = (
    "The paper's figures (arXiv 2609.03515) stand beside those of the same model, rule and tasks; number of "
    "samples, lengths and prompts may differ."
)
Part = Table | Picture | None
"""None: the results do not fill it."""


def page(runs: Sequence[Run], suites: Sequence[Suite], notes: Sequence[str], folder: Path) -> str:
    """The whole report. Pictures are drawn into the folder."""
    settings = [list(same) for _, same in groupby(suites, key=lambda suite: suite.setting.name)]
    blocks = ["# Benchmark results", *_what_was_run(runs, suites, notes)]
    for same in settings:
        blocks += _section(same[0].setting.name, _results(same, folder), _spared(same[0].setting))
    blocks += _section("Models side by side", tables.transfer(suites))
    for same in settings:
        parts = [*map(tables.by_task, same), *_comparisons(same, by_task=True)]
        blocks += _section(f"Task by task: {same[0].setting.name}", parts)
    return "\n\n".join(blocks) + "\n"


def _section(title: str, parts: Iterable[Part], text: Sequence[str] = ()) -> list[str]:
    found = [part.markdown(3) for part in parts if part]
    return [f"## {title}", *text, *found] if found else []


def _spared(setting: Setting) -> list[str]:
    """What to know of rules that spare the prompt."""
    names = [name for name, options in setting.policies.items() if options and options["protect_prompt"]]
    what = "What a table says is evicted gives the budget for the tokens after it."
    return [f"Evicts nothing of a prompt: {', '.join(names)}. {what}"] if names else []


def _what_was_run(runs: Sequence[Run], suites: Sequence[Suite], notes: Sequence[str]) -> list[str]:
    text, lost = [*READING], tables.missing(suites)
    if any(model_of(suite.setting.model) for suite in suites):
        text.append(PAPER)
    if not lost and all(run.meta.get("finished", "unknown") for run in runs):
        text.append("No sample is missing: within a benchmark all rules have answered the same.")
    text += notes
    if not figures.available():
        text.append(f"{figures.MISSING[0].upper()}{figures.MISSING[1:]}.")
    commands = [asked["command"] for run in runs for asked in run.meta.get("asked", [run.meta])]
    text.append("\n".join(["```bash", *commands, "```"]))
    return _section("What was run", [tables.runs(runs), lost], text)


def _results(suites: Sequence[Suite], folder: Path) -> Iterable[Part]:
    yield tables.main(suites)
    for suite in suites:
        yield from (tables.budgets(suite), tables.policies(suite), *ablations.sweeps(suite))
        yield from (ablations.compression(suite), ablations.cumulative(suite), ablations.lazy(suite))
        yield from (tables.groups(suite), tables.depths(suite))
    if figures.available():
        yield from plots.pictures(suites, folder)
    yield from _comparisons(suites, by_task=False)
    yield tables.policy_options(suites[0].setting)


def _comparisons(suites: Sequence[Suite], *, by_task: bool) -> Iterable[Part]:
    return (against_table(s, policy, by_task=by_task) for s in suites for policy in s.setting.references)
