"""Tables of scores in percent, those of the paper in its form. None where the results do not fill one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from inertiakv.evals import paper
from inertiakv.evals.records import Record

from .suites import INERTIAKV, Arm, Run, Setting, Suite, named_options
from .table import Table, index_ranges, interval, percent, published, shown, task_name

GROUPS = ("easy", "hard", "short", "medium", "long")
"""LongBench-v2's, in the order of its table."""
SOME_MISSING = "†: not all samples, see the missing ones."


# Parts that several tables have


def score_table(title: str, note: str, head: list[str], rows: list[list[str]]) -> Table:
    """With what the marks of its cells mean."""
    marked = any(cell.endswith("†") for row in rows for cell in row)
    return Table(title, f"{note} {SOME_MISSING}".strip() if marked else note, head, rows)


def score(suite: Suite, arm: Arm, task: str | None = None) -> str:
    found = suite.estimates.get((arm, task))
    return "-" if found is None else percent(found.mean) + "†" * bool(suite.missing(arm, task))


def score_columns(suite: Suite) -> dict[str, str | None]:
    """Heads of the tasks and of their average (None); a lone task's names its metric."""
    if len(suite.tasks) == 1:
        (task,) = suite.tasks
        return {f"{task_name(task)} ({suite.setting.metrics[task]})": None}
    return {**{task_name(task): task for task in suite.tasks}, "average": None}


def metrics_note(suite: Suite) -> str:
    tasks: dict[str, list[str]] = {}
    for task in suite.tasks:
        tasks.setdefault(suite.setting.metrics[task], []).append(task_name(task))
    if len(tasks) == 1:
        return f"Metric: {next(iter(tasks))}."
    return f"Metrics: {'; '.join(f'{metric}: ' + ', '.join(of) for metric, of in tasks.items())}."


def in_paper(suite: Suite, arm: Arm, task: str | None = None) -> float | None:
    """The paper's figure for this model, policy and task or average, at its compression."""
    model, options = paper.model_of(suite.setting.model), suite.options(arm)
    if model is None or (options is not None and arm.compression != paper.COMPRESSION):
        return None
    if task is None and not paper.is_whole(suite.benchmark, set(suite.tasks)):
        return None
    figures = paper.FIGURES.get((model, task or suite.benchmark), {})
    return next((value for name, value in figures.items() if named_options(name) == options), None)


def tokens_per_second(records: Sequence[Record]) -> float | None:
    """From the end of the prompt on, with its eviction and drafts. None where nothing was decoded."""
    seconds = sum(r.seconds["first_step"] + r.seconds["decode"] for r in records)
    return sum(record.answer_tokens for record in records) / seconds if seconds else None


# One suite


def budgets(suite: Suite) -> Table | None:
    """Policies and budgets by tasks."""
    if len(suite.tasks) == 1:
        return None  # `policies` has it
    columns = score_columns(suite)
    rows = []
    for arm in suite.arms:
        rows.append([arm.policy, arm.evicted, *(score(suite, arm, task) for task in columns.values())])
        figures = [in_paper(suite, arm, task) for task in columns.values()]
        if any(figure is not None for figure in figures):
            rows.append([f"{arm.policy} (paper)", arm.evicted, *map(published, figures)])
    title = f"Table 1: rules and budgets, {suite.title}"
    return score_table(title, metrics_note(suite), ["rule", "evicted", *columns], rows)


def policies(suite: Suite) -> Table:
    """Every policy at every budget: score, interval, and what it cost."""
    metric = "average" if len(suite.tasks) > 1 else suite.setting.metrics[suite.tasks[0]]
    rows = []
    for arm in suite.arms:
        records, found = suite.of(arm), suite.estimates.get((arm, None))
        sizes = ([r.kept_tokens, r.prompt_tokens, r.cache_bytes] for r in records)
        kept, prompt, cache = map(mean, zip(*sizes, strict=True))
        speed = tokens_per_second(records)
        cells = [arm.policy, arm.evicted, score(suite, arm), interval(found) if found else "-"]
        cells += [str(len(records)), str(sum(not r.prediction.strip() for r in records))]
        cells += [f"{kept:,.0f}", f"{100 * kept / prompt:.0f} %", f"{cache / 1e6:,.1f}"]
        rows.append([*cells, f"{speed:,.1f}" if speed else "-"])
    head = ["rule", "evicted", metric, "95 % interval", "n", "empty", "kept tokens", "of prompt", "cache MB"]
    return score_table(f"Every rule: {suite.title}", metrics_note(suite), [*head, "token/s"], rows)


def by_task(suite: Suite) -> Table | None:
    """The means with their intervals."""
    if len(suite.tasks) == 1:
        return None  # `policies` has it
    rows = []
    for arm in suite.arms:
        for task in suite.tasks:
            if found := suite.estimates.get((arm, task)):
                cells = [arm.policy, arm.evicted, task_name(task), suite.setting.metrics[task]]
                rows.append([*cells, score(suite, arm, task), interval(found), str(found.samples)])
    head = ["rule", "evicted", "task", "metric", "score", "95 % interval", "n"]
    return score_table(f"Every task: {suite.title}", "", head, rows)


def groups(suite: Suite) -> Table | None:
    """Of a benchmark whose samples tell their difficulty and length, as LongBench-v2 does."""
    facts = [record.facts for arm in suite.arms for record in suite.of(arm)]
    if not all({"difficulty", "length"} <= fact.keys() for fact in facts):
        return None
    columns = {}
    for kind in ("difficulty", "length"):
        values = {fact[kind] for fact in facts}
        for value in sorted(values, key=lambda v: (GROUPS.index(v) if v in GROUPS else 9, v)):
            columns[value] = (kind, value)
    return _by_fact(suite, f"Groups: {suite.title}", "By difficulty and by length of the text.", columns)


def depths(suite: Suite) -> Table | None:
    """Of a needle grid."""
    facts = [record.facts for arm in suite.arms for record in suite.of(arm)]
    if not all("depth" in fact for fact in facts):
        return None
    columns = {f"{depth:g} %": ("depth", depth) for depth in sorted({fact["depth"] for fact in facts})}
    note = (
        "By the needle's depth in the prompt. ROUGE-L rewards the question's own words, too: an answer that "
        "repeats them and misses the needle may score 50."
    )
    return _by_fact(suite, f"Depths: {suite.title}", note, columns)


def _by_fact(suite: Suite, title: str, note: str, columns: dict[str, tuple[str, Any]]) -> Table:
    """Mean scores of the samples with one value of a fact."""
    rows, most = [], dict.fromkeys(columns, 0)
    for arm in suite.arms:
        cells = []
        for column, (fact, value) in columns.items():
            scores = [record.score for record in suite.of(arm) if record.facts[fact] == value]
            most[column] = max(most[column], len(scores))
            cells.append(percent(mean(scores)) if scores else "-")
        rows.append([arm.policy, arm.evicted, score(suite, arm), *cells])
    head = ["rule", "evicted", "all", *(f"{column} (n {n})" for column, n in most.items())]
    return score_table(title, note, head, rows)


# Several suites


def main(suites: Sequence[Suite]) -> Table | None:
    """One model's benchmarks side by side, at the paper's compression."""
    suites = [s for s in suites if any(arm.compression == paper.COMPRESSION for arm in s.arms)]
    if not suites:
        return None
    at = {None, paper.COMPRESSION}
    arms = list(dict.fromkeys(a for s in suites for a in s.arms if a.budget is None and a.compression in at))
    columns = [("rule", [arm.policy for arm in arms])]
    for suite in suites:
        columns += _beside(suite, suite.title, arms)
    note = f"Averages over the tasks of each benchmark, {100 * paper.COMPRESSION:g} % evicted."
    return _of_columns(f"Tables 3 and 4: benchmarks, {suites[0].setting.name}", note, columns)


def transfer(suites: Sequence[Suite]) -> list[Table]:
    """Models side by side, for each benchmark and length that several have answered."""
    alike: dict[tuple[str, int | None], list[Suite]] = {}
    for suite in suites:
        alike.setdefault((suite.benchmark, suite.length), []).append(suite)
    return [_transfer(group) for group in alike.values() if len({s.setting.model for s in group}) > 1]


def _transfer(suites: Sequence[Suite]) -> Table:
    # A name may stand for different policies in different settings: a row is one policy.
    keyed = [{(str(arm), str(suite.options(arm))): arm for arm in suite.arms} for suite in suites]
    found = {key: arm for arms in keyed for key, arm in arms.items()}
    keys = sorted(found, key=lambda key: found[key].size)
    columns = [
        ("rule", [found[key].policy for key in keys]),
        ("evicted", [found[key].evicted for key in keys]),
    ]
    for suite, arms in zip(suites, keyed, strict=True):
        columns += _beside(suite, suite.setting.name, [arms.get(key) for key in keys])
    same = len({frozenset(suite.tasks) for suite in suites}) == 1
    note = "Averages over tasks." if same else "Averages over tasks, NOT the same for all."
    return _of_columns(f"Table 11: transfer, {suites[0].title}", note, columns)


def _of_columns(title: str, note: str, columns: Sequence[tuple[str, list[str]]]) -> Table:
    rows = [list(row) for row in zip(*(cells for _, cells in columns), strict=True)]
    return score_table(title, note, [head for head, _ in columns], rows)


def _beside(suite: Suite, title: str, arms: Sequence[Arm | None]) -> list[tuple[str, list[str]]]:
    """A column of averages, and one of the paper's figures where there are any."""
    columns = [(title, [score(suite, arm) if arm else "-" for arm in arms])]
    figures = [in_paper(suite, arm) if arm else None for arm in arms]
    if any(figure is not None for figure in figures):
        columns.append(("paper", [*map(published, figures)]))
    return columns


def missing(suites: Sequence[Suite]) -> Table | None:
    """Samples that some arm of a suite has not answered, though another has."""
    rows = []
    for suite in suites:
        for arm in suite.arms:
            alike: dict[tuple[str, str], list[str]] = {}
            for task in suite.tasks:
                gone, total = suite.missing(arm, task), len(suite.samples[task])
                if gone:
                    which = "all" if len(gone) == total else index_ranges(gone)
                    alike.setdefault((f"{total - len(gone)} of {total}", which), []).append(task_name(task))
            for (count, which), tasks in alike.items():
                names = "all tasks" if len(tasks) == len(suite.tasks) else ", ".join(tasks)
                rows.append([suite.setting.name, suite.title, str(arm), names, count, which])
    head = ["model", "benchmark", "rule", "task", "n of each", "missing samples"]
    note = "Means are over what is there, comparisons over the samples that both have answered."
    return Table("Missing samples", note, head, rows) if rows else None


# What was run


def runs(found: Sequence[Run]) -> Table:
    rows = []
    for run in found:
        meta, model = run.meta, run.meta["model"]
        versions = ", ".join(f"{package} {version}" for package, version in meta["versions"].items())
        essays = meta["essays"]["name"] if meta["essays"] else "-"
        revisions = ", ".join(dict.fromkeys(map(_revision, (meta, *meta.get("resumed", [])))))
        about = [model["name"], model.get("source", "-"), model.get("dtype", "-")]
        asked = [meta["template"]["kind"], meta["seed"], essays]
        rows.append([*map(str, (run.folder, len(run.records), *about, *asked, revisions, versions))])
    head = ["folder", "records", "model", "source", "dtype", "template", "seed", "essays", "revision"]
    return Table("Runs", "", [*head, "versions"], rows)


def _revision(meta: dict[str, Any]) -> str:
    git = meta["git_revision"]
    return "-" if git is None else git["commit"][:12] + " and changes" * git["dirty"]


def policy_options(setting: Setting) -> Table:
    """What the policies' names stand for."""
    rows = []
    for name, options in setting.policies.items():
        changed = [f"{k}={shown(v)}" for k, v in (options or {}).items() if v != INERTIAKV.get(k)]
        rows.append([name, "keeps everything" if options is None else ", ".join(changed) or "the defaults"])
    note = "What is not the default of `EvictionConfig`, which is InertiaKV's rule."
    return Table(f"Rules: {setting.name}", note, ["rule", "options"], rows)
