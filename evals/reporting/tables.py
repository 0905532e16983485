"""Tables of scores, the paper's among them and in its form, each from what was run: None where that is not
there. Scores are percent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from inertiakv.evals import paper
from inertiakv.evals.records import Record

from .cells import cell, columns_of, in_paper, metrics, noted
from .configs import INERTIAKV
from .runs import Run
from .suites import Arm, Setting, Suite
from .table import Table
from .text import interval, percent, published, ranges, shown, task_name

GROUPS = {name: place for place, name in enumerate(("easy", "hard", "short", "medium", "long"))}


def runs(found: Sequence[Run]) -> Table:
    """Where everything comes from."""
    rows = []
    for run in found:
        meta, model = run.meta, run.meta["model"]
        versions = ", ".join(f"{package} {version}" for package, version in meta["versions"].items())
        essays = meta["essays"]["name"] if meta["essays"] else "-"
        rows.append(
            [
                *(str(run.folder), str(len(run.records)), model["name"], str(model.get("source", "-"))),
                *(str(model.get("dtype", "-")), meta["template"]["kind"], str(meta["seed"]), essays),
                *(", ".join(dict.fromkeys(map(_revision, (meta, *meta.get("resumed", []))))), versions),
            ]
        )
    head = ["folder", "records", "model", "source", "dtype", "template", "seed", "essays", "revision"]
    return Table("Runs", "", [*head, "versions"], rows)


def budgets(suite: Suite) -> Table | None:
    """Rules and budgets by tasks."""
    if len(suite.tasks) == 1:
        return None  # `rules` has it
    columns = columns_of(suite)
    rows = []
    for arm in suite.arms:
        rows.append([arm.policy, arm.evicted, *(cell(suite, arm, task) for _, task in columns)])
        figures = [in_paper(suite, arm, task) for _, task in columns]
        if any(f is not None for f in figures):
            rows.append([f"{arm.policy} (paper)", arm.evicted, *map(published, figures)])
    head = ["rule", "evicted", *(title for title, _ in columns)]
    title = f"Table 1: rules and budgets, {suite.title}"
    return Table(title, noted(metrics(suite), rows), head, rows)


def rules(suite: Suite) -> Table:
    """Every rule at every budget: score, interval, and what it cost."""
    score = "average" if len(suite.tasks) > 1 else suite.setting.metrics[suite.tasks[0]]
    head = ["rule", "evicted", score, "95 % interval", "n", "empty", "kept tokens", "of prompt", "cache MB"]
    rows = []
    for arm in suite.arms:
        records, found = suite.of(arm), suite.estimates.get((arm, None))
        prompt = _mean(records, lambda r: r.prompt_tokens)
        kept = _mean(records, lambda r: r.kept_tokens)
        speed = tokens_per_second(records)
        rows.append(
            [
                *(arm.policy, arm.evicted, cell(suite, arm), interval(found) if found else "-"),
                *(str(len(records)), str(sum(not r.prediction.strip() for r in records))),
                *(f"{kept:,.0f}", f"{100 * kept / prompt:.0f} %"),
                *(f"{_mean(records, lambda r: r.cache_bytes) / 1e6:,.1f}", f"{speed:,.1f}" if speed else "-"),
            ]
        )
    title = f"Every rule: {suite.title}"
    return Table(title, noted(metrics(suite), rows), [*head, "token/s"], rows)


def by_task(suite: Suite) -> Table | None:
    """The means with their intervals."""
    if len(suite.tasks) == 1:
        return None  # `rules` has it
    rows = []
    for arm in suite.arms:
        for task in suite.tasks:
            if found := suite.estimates.get((arm, task)):
                cells = [arm.policy, arm.evicted, task_name(task), suite.setting.metrics[task]]
                rows.append([*cells, cell(suite, arm, task), interval(found), str(found.samples)])
    head = ["rule", "evicted", "task", "metric", "score", "95 % interval", "n"]
    return Table(f"Every task: {suite.title}", noted("", rows), head, rows)


def main(suites: Sequence[Suite]) -> Table | None:
    """One model's benchmarks side by side, at the paper's compression."""
    at = {None, paper.COMPRESSION}
    suites = [s for s in suites if any(arm.compression == paper.COMPRESSION for arm in s.arms)]
    if not suites:
        return None
    arms = list(dict.fromkeys(a for s in suites for a in s.arms if a.budget is None and a.compression in at))
    beside = [column for suite in suites for column in _beside(suite, suite.title, arms)]
    head = ["rule", *(title for title, _ in beside)]
    policies = [arm.policy for arm in arms]
    rows = [list(row) for row in zip(policies, *(column for _, column in beside), strict=True)]
    model = suites[0].setting.name
    note = f"Averages over the tasks of each benchmark, {100 * paper.COMPRESSION:g} % evicted."
    return Table(f"Tables 3 and 4: benchmarks, {model}", noted(note, rows), head, rows)


def transfer(suites: Sequence[Suite]) -> list[Table]:
    """Models side by side, for each benchmark and length that several have answered."""
    alike: dict[tuple[str, int | None], list[Suite]] = {}
    for suite in suites:
        alike.setdefault((suite.benchmark, suite.length), []).append(suite)
    return [_transfer(group) for group in alike.values() if len({s.setting.model for s in group}) > 1]


def _transfer(suites: Sequence[Suite]) -> Table:
    # Names may stand for different rules under different settings: what is one row is one rule.
    keyed = [{(str(arm), str(suite.rule(arm))): arm for arm in suite.arms} for suite in suites]
    keys = {key: arm for arms in keyed for key, arm in arms.items()}
    rows = sorted(keys, key=lambda key: keys[key].size)
    beside = [
        column
        for suite, arms in zip(suites, keyed, strict=True)
        for column in _beside(suite, suite.setting.name, [arms.get(key) for key in rows])
    ]
    head = ["rule", "evicted", *(title for title, _ in beside)]
    labels = [[keys[key].policy for key in rows], [keys[key].evicted for key in rows]]
    cells = [list(row) for row in zip(*labels, *(column for _, column in beside), strict=True)]
    tasks = {frozenset(suite.tasks) for suite in suites}
    note = "Averages over tasks." if len(tasks) == 1 else "Averages over tasks, NOT the same for all."
    title = f"Table 11: transfer, {suites[0].title}"
    return Table(title, noted(note, cells), head, cells)


def _beside(suite: Suite, title: str, arms: Sequence[Arm | None]) -> list[tuple[str, list[str]]]:
    """A column of averages, and one of the paper's figures where there are any."""
    made = [(title, [cell(suite, arm) if arm else "-" for arm in arms])]
    figures = [in_paper(suite, arm) if arm else None for arm in arms]
    if any(figure is not None for figure in figures):
        made.append(("paper", [*map(published, figures)]))
    return made


def groups(suite: Suite) -> Table | None:
    """Of a benchmark whose samples tell their difficulty and length, as LongBench-v2 does."""
    facts = [record.facts for arm in suite.arms for record in suite.of(arm)]
    if not all({"difficulty", "length"} <= fact.keys() for fact in facts):
        return None
    kinds = [
        (kind, sorted({fact[kind] for fact in facts}, key=lambda value: (GROUPS.get(value, 9), value)))
        for kind in ("difficulty", "length")
    ]
    columns = {value: (kind, value) for kind, values in kinds for value in values}
    return _by_fact(suite, f"Groups: {suite.title}", "By difficulty and by length of the text.", columns)


def depths(suite: Suite) -> Table | None:
    """Of a needle grid."""
    found = grid_depths(suite)
    columns = {f"{depth:g} %": ("depth", depth) for depth in found}
    note = (
        "By the needle's depth in the prompt. ROUGE-L rewards the question's own words, too: an answer that "
        "repeats them and misses the needle may score 50."
    )
    return _by_fact(suite, f"Depths: {suite.title}", note, columns) if columns else None


def grid_depths(suite: Suite) -> list[float]:
    """Of one needle a sample; empty where samples tell none."""
    facts = [record.facts for arm in suite.arms for record in suite.of(arm)]
    return sorted({fact["depth"] for fact in facts}) if all("depth" in fact for fact in facts) else []


def _by_fact(suite: Suite, title: str, note: str, columns: dict[str, tuple[str, Any]]) -> Table:
    rows, most = [], dict.fromkeys(columns, 0)
    for arm in suite.arms:
        cells = []
        for column, (fact, value) in columns.items():
            scores = [record.score for record in suite.of(arm) if record.facts[fact] == value]
            most[column] = max(most[column], len(scores))
            cells.append(percent(sum(scores) / len(scores)) if scores else "-")
        rows.append([arm.policy, arm.evicted, cell(suite, arm), *cells])
    head = ["rule", "evicted", "all", *(f"{column} (n {n})" for column, n in most.items())]
    return Table(title, noted(note, rows), head, rows)


def missing(suites: Sequence[Suite]) -> Table | None:
    """Samples that some rule of a suite has not answered, though another has."""
    rows = []
    for suite in suites:
        for arm in suite.arms:
            alike: dict[tuple[str, str], list[str]] = {}
            for task in suite.tasks:
                gone, every = [i for _, i in suite.missing(arm, task)], len(suite.samples[task])
                if gone:
                    which = "all" if len(gone) == every else ranges(gone)
                    alike.setdefault((f"{every - len(gone)} of {every}", which), []).append(task_name(task))
            for (count, which), tasks in alike.items():
                names = "all tasks" if len(tasks) == len(suite.tasks) else ", ".join(tasks)
                rows.append([suite.setting.name, suite.title, str(arm), names, count, which])
    head = ["model", "benchmark", "rule", "task", "n of each", "missing samples"]
    note = "Means are over what is there, comparisons over the samples that both have answered."
    return Table("Missing samples", note, head, rows) if rows else None


def rule_options(setting: Setting) -> Table:
    """What the rules' names stand for."""
    rows = []
    for label, rule in setting.rules.items():
        options = {} if rule is None else {name: v for name, v in rule.items() if v != INERTIAKV.get(name)}
        text = ", ".join(f"{name}={shown(value)}" for name, value in options.items())
        rows.append([label, "keeps everything" if rule is None else text or "the defaults"])
    note = "What is not the default of `EvictionConfig`, which is InertiaKV's rule."
    return Table(f"Rules: {setting.name}", note, ["rule", "options"], rows)


def tokens_per_second(records: Sequence[Record]) -> float | None:
    """From the end of the prompt on: with its eviction and drafts. None where nothing was decoded."""
    seconds = sum(r.seconds["first_step"] + r.seconds["decode"] for r in records)
    return sum(record.answer_tokens for record in records) / seconds if seconds else None


def _revision(meta: dict[str, Any]) -> str:
    """A commit, and whether the files were its own."""
    git = meta["git_revision"]
    return "-" if git is None else git["commit"][:12] + " and changes" * git["dirty"]


def _mean(records: Sequence[Record], of: Callable[[Record], float]) -> float:
    return sum(map(of, records)) / len(records)
