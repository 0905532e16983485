"""The report: what is in it, and the same as Markdown and as one HTML file."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inertiakv.evals.paper import model_of
from inertiakv.evals.statistics import RESAMPLES

from . import ablations, plots, tables
from .figures import MISSING, available
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
    """Everything there is to say. Pictures are drawn into the folder."""
    lost = tables.missing(suites)
    whole = not lost and all(run.meta.get("finished", "unknown") for run in runs)
    complete = ["No sample is missing: within a benchmark all rules have answered the same."] * whole
    missing_plots = [] if available() else [f"{MISSING[0].upper()}{MISSING[1:]}."]
    commands = [asked["command"] for run in runs for asked in run.meta.get("asked", [run.meta])]
    beside = [PAPER] * any(model_of(suite.setting.model) for suite in suites)
    text = [*READING, *beside, *complete, *notes, *missing_plots]
    first = Section("What was run", text, commands, [tables.runs(runs), *([lost] if lost else [])])
    middle = [_section(setting, suites, reference, folder) for setting in settings(suites)]
    across = tables.transfer(suites)
    last = [_detail(setting, suites, reference) for setting in settings(suites)]
    models = [Section("Models side by side", parts=[*across])] if across else []
    return [first, *middle, *models, *(section for section in last if section.parts)]


def settings(suites: Sequence[Suite]) -> list[Setting]:
    return list({id(suite.setting): suite.setting for suite in suites}.values())


def _section(setting: Setting, suites: Sequence[Suite], reference: str, folder: Path) -> Section:
    mine = [suite for suite in suites if suite.setting is setting]
    drawn = plots.pictures(mine, folder) if available() else []
    text = []
    if reference not in setting.rules:
        text.append(f"Nothing is compared with {reference}, which was not run here.")
    if spared := [name for name, rule in setting.rules.items() if rule and rule["protect_prompt"]]:
        text.append(
            f"Evicts nothing of a prompt: {', '.join(spared)}. What a table says is evicted gives the budget "
            "for the tokens after it."
        )
    parts: list[Table | Picture] = [
        *_there([tables.main(mine)]),
        *(part for suite in mine for part in _paper_tables(suite)),
        *drawn,
        *(part for suite in mine for part in _comparisons(suite, reference, by_task=False)),
        tables.rule_options(setting),
    ]
    return Section(setting.name, text, parts=parts)


def _detail(setting: Setting, suites: Sequence[Suite], reference: str) -> Section:
    mine = [suite for suite in suites if suite.setting is setting]
    means = _there(tables.by_task(suite) for suite in mine)
    pairs = [table for suite in mine for table in _comparisons(suite, reference, by_task=True)]
    return Section(f"Task by task: {setting.name}", parts=[*means, *pairs])


def _paper_tables(suite: Suite) -> list[Table]:
    made = [
        *(tables.budgets(suite), tables.rules(suite), *ablations.sweeps(suite)),
        *(ablations.compression(suite), ablations.cumulative(suite), ablations.lazy(suite)),
        *(tables.groups(suite), tables.depths(suite)),
    ]
    return _there(made)


def _comparisons(suite: Suite, reference: str, *, by_task: bool) -> list[Table]:
    policies = suite.setting.references(reference)
    return _there(against_table(suite, policy, by_task=by_task) for policy in policies)


def _there(made: Iterable[Table | None]) -> list[Table]:
    return [table for table in made if table is not None]


def markdown(parts: Sequence[Section]) -> str:
    blocks = [f"# {TITLE}"]
    for section in parts:
        blocks += [f"## {section.title}", *section.text]
        blocks += ["\n".join(["```bash", *section.commands, "```"])] * bool(section.commands)
        for part in section.parts:
            if isinstance(part, Table):
                blocks.append(part.markdown(3))
            else:
                blocks.append(
                    f"### {part.title}\n\n![{part.title}]({part.file.parent.name}/{part.file.name})"
                )
    return "\n\n".join(blocks) + "\n"


def one_file(parts: Sequence[Section]) -> str:
    """HTML with its pictures in it."""
    blocks = [f"<h1>{TITLE}</h1>"]
    for section in parts:
        blocks += [f"<h2>{html.escape(section.title)}</h2>"]
        blocks += [f"<p>{html.escape(text)}</p>" for text in section.text]
        blocks += [f"<pre>{html.escape(chr(10).join(section.commands))}</pre>"] * bool(section.commands)
        blocks += [part.html(3) if isinstance(part, Table) else _html_picture(part) for part in section.parts]
    body = "\n".join(blocks)
    head = f'<meta charset="utf-8">\n<title>{TITLE}</title>\n<style>\n{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _html_picture(picture: Picture) -> str:
    title, data = html.escape(picture.title), base64.b64encode(picture.file.read_bytes()).decode()
    return f'<h3>{title}</h3>\n<img alt="{title}" src="data:image/png;base64,{data}">'
