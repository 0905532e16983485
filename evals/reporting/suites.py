"""Runs put together: what can be compared is in one suite, what cannot is kept apart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from inertiakv.evals.records import Record
from inertiakv.evals.rules import label
from inertiakv.evals.statistics import Comparison, Estimate, Strata, compare, estimate

from .configs import Rule, named, rule
from .runs import Run
from .text import task_name

BENCHMARKS = {
    "ruler": "RULER",
    "longbench": "LongBench",
    "longbench-v2": "LongBench-v2",
    "niah": "needle in a haystack",
}
VARYING = ("seconds", "cache_bytes")
"""What may differ between two records of the same answer."""


@dataclass(frozen=True)
class Arm:
    """A rule at a budget."""

    policy: str
    compression: float | None
    budget: int | None

    def __str__(self) -> str:
        return label(self.policy, self.compression, self.budget)

    @property
    def evicted(self) -> str:
        if self.budget is not None:
            return f"all but {self.budget:,}"
        return "-" if self.compression is None else f"{100 * self.compression:g} %"

    @property
    def size(self) -> tuple[int, float]:
        """Orders budgets: the full cache, shares of the prompt, numbers of tokens; the largest first."""
        if self.budget is not None:
            return 2, -self.budget
        return (0, 0) if self.compression is None else (1, self.compression)

    def at_its_budget(self, policy: str) -> Arm:
        return dataclasses.replace(self, policy=policy)


@dataclass(frozen=True)
class Setting:
    """What all records of a suite have in common."""

    name: str
    model: str
    folders: tuple[Path, ...]
    rules: dict[str, Rule | None]
    """By their names, in the order in which they were run."""
    metrics: dict[str, str]
    """Of tasks."""

    def policy(self, wanted: str) -> str | None:
        """What a named policy is called here."""
        rule = named(wanted)
        return next((name for name, one in self.rules.items() if one == rule), None)

    def references(self, chosen: str) -> list[str]:
        """What every rule is compared with: the chosen policy, and InertiaKV."""
        policies = dict.fromkeys([chosen, self.policy("inertiakv")])
        return [policy for policy in policies if policy in self.rules]


@dataclass(eq=False)
class Suite:
    """A benchmark at one length, under one setting. Tasks are columns of tables, arms rows."""

    setting: Setting
    benchmark: str
    length: int | None
    records: dict[tuple[Arm, str], dict[int, Record]]
    """Of an arm and a task, by the sample's index."""

    @property
    def title(self) -> str:
        """What was asked: a benchmark's name alone would promise all of its tasks."""
        name = BENCHMARKS.get(self.benchmark, self.benchmark)
        tasks = [task_name(task) for task in self.tasks if task != self.benchmark]
        if tasks:
            name += f" ({', '.join(tasks) if len(tasks) < 4 else f'{len(tasks)} tasks'})"
        return name if self.length is None else f"{name} at {self.length:,} tokens"

    @cached_property
    def arms(self) -> list[Arm]:
        order = list(self.setting.rules)
        return sorted({arm for arm, _ in self.records}, key=lambda arm: (arm.size, order.index(arm.policy)))

    @cached_property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for _, task in self.records))

    @cached_property
    def samples(self) -> dict[str, set[int]]:
        """Of each task, every sample that any rule has answered."""
        found: dict[str, set[int]] = {task: set() for task in self.tasks}
        for (_, task), answers in self.records.items():
            found[task] |= answers.keys()
        return found

    def rule(self, arm: Arm) -> Rule | None:
        return self.setting.rules[arm.policy]

    def of(self, arm: Arm, task: str | None = None) -> list[Record]:
        """Its records, of one task or of all."""
        tasks = self.tasks if task is None else [task]
        return [r for t in tasks for _, r in sorted(self.records.get((arm, t), {}).items())]

    def missing(self, arm: Arm, task: str | None = None) -> list[tuple[str, int]]:
        """Samples, of one task or of all, that others have answered and this one has not."""
        tasks = self.tasks if task is None else [task]
        return [
            (t, i) for t in tasks for i in sorted(self.samples[t] - self.records.get((arm, t), {}).keys())
        ]

    @cached_property
    def estimates(self) -> dict[tuple[Arm, str | None], Estimate]:
        """Of an arm and a task, or None for the average over the suite's tasks, where it has all of them."""
        found: dict[tuple[Arm, str | None], Estimate] = {}
        for arm in self.arms:
            strata = [[r.score for r in self.of(arm, task)] for task in self.tasks]
            for task, scores in zip(self.tasks, strata, strict=True):
                if scores:
                    found[arm, task] = estimate([scores])
            if all(strata):
                found[arm, None] = found[arm, self.tasks[0]] if len(strata) == 1 else estimate(strata)
        return found

    def pairs(self, arm: Arm, other: Arm, task: str | None = None) -> Strata:
        """Differences of score on the samples that both have answered, of each task that there are any of."""
        tasks = self.tasks if task is None else [task]
        found = []
        for name in tasks:
            mine, theirs = (self.records.get((one, name), {}) for one in (arm, other))
            common = sorted(mine.keys() & theirs.keys())
            found.append([mine[i].score - theirs[i].score for i in common])
        return [differences for differences in found if differences]

    def compare(self, arm: Arm, other: Arm, task: str | None = None) -> Comparison | None:
        """None where they have no sample in common."""
        pairs = self.pairs(arm, other, task)
        return compare(pairs) if pairs else None

    def partner(self, arm: Arm, policy: str) -> Arm | None:
        """The arm of that policy that this one is to be compared with: at its budget, or the full cache."""
        candidates = (arm.at_its_budget(policy), Arm(policy, None, None))
        return next((one for one in candidates if one in self.arms and one != arm), None)


def combine(runs: Sequence[Run]) -> tuple[list[Suite], list[str]]:
    """Suites of all runs, and what a reader should be told. Raises ValueError where two runs contradict each
    other."""
    identities: dict[str, list[Run]] = {}
    for run in runs:
        identities.setdefault(json.dumps(_identity(run), sort_keys=True), []).append(run)
    names = _names([_identity(group[0]) for group in identities.values()])
    suites: list[Suite] = []
    notes = [note for run in runs for note in run.notes]
    for name, group in zip(names, identities.values(), strict=True):
        suites += _suites(name, group, notes)
    return suites, notes


def _identity(run: Run) -> dict[str, Any]:
    """What results must have in common to be compared."""
    template = {"template": run.meta["template"]["kind"], "template's sha256": run.meta["template"]["sha256"]}
    return {**run.meta["model"], **template, "seed": run.meta["seed"]}


def _names(identities: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each: the model's, and whatever tells it from another with the same name."""
    short = [str(identity["name"]).rstrip("/").split("/")[-1] for identity in identities]
    names = []
    for name, identity in zip(short, identities, strict=True):
        alike = [other for other, of in zip(identities, short, strict=True) if of == name]
        telling = [key for key in identity if any(other.get(key) != identity[key] for other in alike)]
        names.append(", ".join([name, *(f"{key} {identity[key]}" for key in telling)]))
    return names


def _suites(name: str, runs: Sequence[Run], notes: list[str]) -> list[Suite]:
    rules = _agreed(runs, "policies", rule, "rule")
    metrics = _agreed(runs, "tasks", lambda task: str(task["metric"]), "metric")
    model = str(runs[0].meta["model"]["name"])
    setting = Setting(name, model, tuple(run.folder for run in runs), rules, metrics)
    suites: dict[tuple[str, int | None], Suite] = {}
    for record in _merge(runs, notes):
        benchmark = record.task.partition(":")[0]
        suite = suites.setdefault((benchmark, record.length), Suite(setting, benchmark, record.length, {}))
        arm = Arm(record.policy, record.compression, record.budget_asked)
        suite.records.setdefault((arm, record.task), {})[record.index] = record
    return [suites[key] for key in sorted(suites, key=lambda key: (key[0], key[1] or 0))]


def _agreed(runs: Sequence[Run], key: str, read: Callable[[Any], Any], what: str) -> dict[str, Any]:
    """The policies or tasks of all runs. Raises ValueError where one name stands for two things."""
    found: dict[str, tuple[Any, Path]] = {}
    for run in runs:
        for name, told in run.meta[key].items():
            value = read(told)
            known, folder = found.setdefault(name, (value, run.folder))
            if known != value:
                raise ValueError(f"{name!r} is one {what} in {folder} and another in {run.folder}")
    return {name: value for name, (value, _) in found.items()}


def _merge(runs: Sequence[Run], notes: list[str]) -> list[Record]:
    """Every record once. Raises ValueError where two of the same answer, or question, differ."""
    answers: dict[tuple[Any, ...], tuple[Record, Path]] = {}
    questions: dict[tuple[Any, ...], tuple[Any, Path]] = {}
    repeated = 0
    for run in runs:
        for record in run.records:
            sample = f"{record.task}, length {record.length}, sample {record.index}"
            asked = (record.prompt_sha256, record.references)
            known_question, folder = questions.setdefault(record.key[:3], (asked, run.folder))
            if known_question != asked:
                raise ValueError(f"{sample} is one prompt in {folder} and another in {run.folder}")
            if record.key not in answers:
                answers[record.key] = record, run.folder
                continue
            known, folder = answers[record.key]
            if _content(known) != _content(record):
                raise ValueError(
                    f"{record.policy} on {sample} gave one answer in {folder} and another in {run.folder}"
                )
            repeated += 1
    if repeated:
        notes.append(f"{repeated} records are there twice, with the same answer: counted once.")
    return [record for record, _ in answers.values()]


def _content(record: Record) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in VARYING}
