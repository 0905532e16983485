"""The report: its sections, as Markdown and as one HTML file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inertiakv.evals.paper import model_of
from inertiakv.evals.statistics import RESAMPLES

from . import ablations, figures, plots, tables
from .paired import against_table
from .plots import Picture
from .runs import Run
from .suites import Setting, Suite
from .table import Table

TITLE = "Benchmark results"
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
STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h2 { border-bottom: 1px solid #ccc; margin-top: 3rem; } h3 { margin-top: 2rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap; }
th.left, td.left { text-align: left; } th { border-bottom: 1px solid #888; }
pre { overflow-x: auto; background: #f5f5f5; padding: .6rem; } img { max-width: 100%; }
"""


@dataclass(frozen=True)
class Section:
    title: str
    text: list[str] = field(default_factory=list)
    """Paragraphs."""
    commands: list[str] = field(default_factory=list)
    parts: list[Table | Picture] = field(default_factory=list)


def sections(
    runs: Sequence[Run], suites: Sequence[Suite], notes: Sequence[str], reference: str, folder: Path
) -> list[Section]:
    """The whole report. Pictures are drawn into the folder."""
    by_setting: dict[int, list[Suite]] = {}
    for suite in suites:
        by_setting.setdefault(id(suite.setting), []).append(suite)
    settings = [(same[0].setting, same) for same in by_setting.values()]
    across = tables.transfer(suites)
    details = [_detail(setting, same, reference) for setting, same in settings]
    return [
        _what_was_run(runs, suites, notes),
        *(_results(setting, same, reference, folder) for setting, same in settings),
        *([Section("Models side by side", parts=[*across])] if across else []),
        *(section for section in details if section.parts),
    ]


def _what_was_run(runs: Sequence[Run], suites: Sequence[Suite], notes: Sequence[str]) -> Section:
    text, lost = [*READING], tables.missing(suites)
    if any(model_of(suite.setting.model) for suite in suites):
        text.append(PAPER)
    if not lost and all(run.meta.get("finished", "unknown") for run in runs):
        text.append("No sample is missing: within a benchmark all rules have answered the same.")
    text += notes
    if not figures.available():
        text.append(f"{figures.MISSING[0].upper()}{figures.MISSING[1:]}.")
    commands = [asked["command"] for run in runs for asked in run.meta.get("asked", [run.meta])]
    return Section("What was run", text, commands, [tables.runs(runs), *([lost] if lost else [])])


def _results(setting: Setting, suites: Sequence[Suite], reference: str, folder: Path) -> Section:
    text = []
    if reference not in setting.policies:
        text.append(f"Nothing is compared with {reference}, which was not run here.")
    if spared := [
        name for name, options in setting.policies.items() if options and options["protect_prompt"]
    ]:
        text.append(
            f"Evicts nothing of a prompt: {', '.join(spared)}. What a table says is evicted gives the budget "
            "for the tokens after it."
        )
    parts: list[Table | Picture | None] = [tables.main(suites)]
    for suite in suites:
        parts += [tables.budgets(suite), tables.policies(suite), *ablations.sweeps(suite)]
        parts += [ablations.compression(suite), ablations.cumulative(suite), ablations.lazy(suite)]
        parts += [tables.groups(suite), tables.depths(suite)]
    parts += plots.pictures(suites, folder) if figures.available() else []
    parts += _comparisons(setting, suites, reference, by_task=False)
    parts.append(tables.policy_options(setting))
    return Section(setting.name, text, parts=[part for part in parts if part])


def _detail(setting: Setting, suites: Sequence[Suite], reference: str) -> Section:
    means = map(tables.by_task, suites)
    parts = [*means, *_comparisons(setting, suites, reference, by_task=True)]
    return Section(f"Task by task: {setting.name}", parts=[part for part in parts if part])


def _comparisons(
    setting: Setting, suites: Sequence[Suite], reference: str, *, by_task: bool
) -> list[Table | None]:
    policies = setting.references(reference)
    return [against_table(suite, policy, by_task=by_task) for suite in suites for policy in policies]


def markdown(sections: Sequence[Section]) -> str:
    blocks = [f"# {TITLE}"]
    for section in sections:
        blocks += [f"## {section.title}", *section.text]
        if section.commands:
            blocks.append("\n".join(["```bash", *section.commands, "```"]))
        blocks += [part.markdown(3) for part in section.parts]
    return "\n\n".join(blocks) + "\n"


def one_file(sections: Sequence[Section]) -> str:
    """HTML with its pictures in it."""
    blocks = [f"<h1>{TITLE}</h1>"]
    for section in sections:
        blocks += [f"<h2>{html.escape(section.title)}</h2>"]
        blocks += [f"<p>{html.escape(text)}</p>" for text in section.text]
        if section.commands:
            blocks.append(f"<pre>{html.escape(chr(10).join(section.commands))}</pre>")
        blocks += [part.html(3) for part in section.parts]
    body = "\n".join(blocks)
    head = f'<meta charset="utf-8">\n<title>{TITLE}</title>\n<style>\n{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'
