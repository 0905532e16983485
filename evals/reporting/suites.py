"""Results folders of `scripts/eval.py`, read, checked and put together to suites: all results that can be
compared, of one benchmark at one length with one model."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from inertiakv import EvictionConfig, policy
from inertiakv.evals.records import Record, read_meta, read_records
from inertiakv.evals.rules import KEPT, label, parse_policy
from inertiakv.evals.statistics import Estimate, Strata, estimate

from .table import task_name

BENCHMARKS = {
    "ruler": "RULER",
    "longbench": "LongBench",
    "longbench-v2": "LongBench-v2",
    "niah": "needle in a haystack",
}
DEPENDENT = {"alpha": "aggregation", "scorer_seed": "scorer", "scorer_file": "scorer"}
"""Options that change together with another one."""

Options = dict[str, Any]
"""The fields of an eviction config without the budget: they tell policies apart, names are for people."""


DEFAULTS = dataclasses.asdict(EvictionConfig())
INERTIAKV: Options = {name: value for name, value in DEFAULTS.items() if name not in KEPT}
"""The defaults are the paper's method."""


def recorded_options(config: Mapping[str, Any] | None) -> Options | None:
    """The options of a config in run_meta.json; None is the full cache. Options newer than the run have their
    defaults."""
    if config is None:
        return None
    return {name: value for name, value in (INERTIAKV | dict(config)).items() if name not in KEPT}


@functools.cache
def named_options(text: str) -> Options | None:
    """The options of a policy as the command line has it: `inertiakv`, or `inertiakv:alpha=0.3:pool=7`."""
    name, changes = parse_policy(text)
    config = policy(name, **changes)
    return None if config is None else recorded_options(json.loads(json.dumps(dataclasses.asdict(config))))


def changed_options(options: Options) -> Options:
    """The options that are not InertiaKV's, without those that only follow from another."""
    changed = {name: value for name, value in options.items() if value != INERTIAKV.get(name)}
    return {name: value for name, value in changed.items() if DEPENDENT.get(name) not in changed}


@dataclass(frozen=True)
class Arm:
    """A policy at a budget."""

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
    policies: dict[str, Options | None]
    """In the order in which they were run."""
    metrics: dict[str, str]
    """By task."""

    def policy(self, wanted: str) -> str | None:
        """The name that a policy of the package has here."""
        options = named_options(wanted)
        return next((name for name, found in self.policies.items() if found == options), None)

    @property
    def references(self) -> list[str]:
        """The policies that all others are compared with: the full cache, and InertiaKV."""
        return [name for name in map(self.policy, ("full", "inertiakv")) if name]


@dataclass(eq=False)
class Suite:
    """A benchmark at one length, under one setting."""

    setting: Setting
    benchmark: str
    length: int | None
    records: dict[tuple[Arm, str], dict[int, Record]]
    """By arm and task, then by sample index."""

    @property
    def title(self) -> str:
        """With the tasks: a benchmark's name alone would promise all of them."""
        name = BENCHMARKS.get(self.benchmark, self.benchmark)
        tasks = [task_name(task) for task in self.tasks if task != self.benchmark]
        if tasks:
            name += f" ({', '.join(tasks) if len(tasks) < 4 else f'{len(tasks)} tasks'})"
        return name if self.length is None else f"{name} at {self.length:,} tokens"

    @cached_property
    def arms(self) -> list[Arm]:
        order = list(self.setting.policies)
        return sorted({arm for arm, _ in self.records}, key=lambda arm: (arm.size, order.index(arm.policy)))

    @cached_property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for _, task in self.records))

    @cached_property
    def samples(self) -> dict[str, set[int]]:
        """By task: the samples that any arm has answered."""
        found: dict[str, set[int]] = {task: set() for task in self.tasks}
        for (_, task), answered in self.records.items():
            found[task] |= answered.keys()
        return found

    def options(self, arm: Arm) -> Options | None:
        return self.setting.policies[arm.policy]

    def of(self, arm: Arm, task: str | None = None) -> list[Record]:
        """The records of an arm, of one task or of all."""
        tasks = self.tasks if task is None else [task]
        return [r for t in tasks for _, r in sorted(self.records.get((arm, t), {}).items())]

    def missing(self, arm: Arm, task: str | None = None) -> list[int]:
        """Samples, of one task or of all, that other arms have answered and this one has not."""
        tasks = self.tasks if task is None else [task]
        return [i for t in tasks for i in sorted(self.samples[t] - self.records.get((arm, t), {}).keys())]

    @cached_property
    def estimates(self) -> dict[tuple[Arm, str | None], Estimate]:
        """By arm and task; task None is the average over tasks, of arms that have records of all."""
        found: dict[tuple[Arm, str | None], Estimate] = {}
        for arm in self.arms:
            strata = [[r.score for r in self.of(arm, task)] for task in self.tasks]
            found |= {(arm, t): estimate([s]) for t, s in zip(self.tasks, strata, strict=True) if s}
            if all(strata):
                found[arm, None] = found[arm, self.tasks[0]] if len(strata) == 1 else estimate(strata)
        return found

    def differences(self, arm: Arm, other: Arm, task: str | None = None) -> Strata:
        """Differences of score on the samples that both have answered, for each task that has any."""
        found = []
        for name in self.tasks if task is None else [task]:
            mine, theirs = (self.records.get((one, name), {}) for one in (arm, other))
            found.append([mine[i].score - theirs[i].score for i in sorted(mine.keys() & theirs.keys())])
        return [stratum for stratum in found if stratum]

    def partner(self, arm: Arm, policy: str) -> Arm | None:
        """The arm of that policy that this one is to be compared with: at its budget, or the full cache."""
        candidates = (arm.at_its_budget(policy), Arm(policy, None, None))
        return next((one for one in candidates if one in self.arms and one != arm), None)


# Folders

VARYING = ("seconds", "cache_bytes")
"""Fields that may differ between two records of the same answer."""


@dataclass(frozen=True)
class Run:
    folder: Path
    meta: dict[str, Any]
    records: list[Record]
    notes: list[str]


def read_run(folder: Path) -> Run:
    """A results folder. Raises ValueError where it is none, and for a malformed or unexpected record."""
    files = sorted(folder.glob("records*.jsonl"))
    if not files:
        raise ValueError(f"{folder} holds no records.jsonl: give folders that scripts/eval.py has written")
    meta, records = read_meta(folder), read_records(folder)
    if not records:
        raise ValueError(f"there are no records in {', '.join(map(str, files))}")
    for record in records:
        for kind, name in (("policies", record.policy), ("tasks", record.task)):
            if name not in meta[kind]:
                raise ValueError(
                    f"{folder}: {record.policy} on {_sample(record)}: {name!r} is not among the {kind} of "
                    "run_meta.json"
                )
    cut = [file for file in files if not file.read_bytes().endswith(b"\n") and file.stat().st_size]
    notes = [f"The last line of {file} was not written to its end: left out." for file in cut]
    if meta.get("finished", "") is None:
        notes.append(f"The run in {folder} has not finished: the same command with --resume goes on.")
    return Run(folder, meta, records, notes)


def combine(runs: Sequence[Run]) -> tuple[list[Suite], list[str]]:
    """All suites, and notes for the reader. Raises ValueError where two runs contradict one another."""
    by_identity: dict[str, list[Run]] = {}
    for run in runs:
        by_identity.setdefault(json.dumps(_identity(run), sort_keys=True), []).append(run)
    names = _names([_identity(group[0]) for group in by_identity.values()])
    suites: list[Suite] = []
    notes = [note for run in runs for note in run.notes]
    for name, group in zip(names, by_identity.values(), strict=True):
        suites += _suites(name, group, notes)
    return suites, notes


def _identity(run: Run) -> dict[str, Any]:
    """What results must have in common to be compared."""
    template = run.meta["template"]
    about = {"template": template["kind"], "template's sha256": template["sha256"]}
    if template.get("args"):
        about["template's arguments"] = template["args"]
    return {**run.meta["model"], **about, "seed": run.meta["seed"]}


def _names(identities: Sequence[dict[str, Any]]) -> list[str]:
    """For each the model's name, and whatever tells it from another with the same name."""
    short = [str(identity["name"]).rstrip("/").split("/")[-1] for identity in identities]
    names = []
    for name, identity in zip(short, identities, strict=True):
        alike = [other for other, of in zip(identities, short, strict=True) if of == name]
        differing = [key for key in identity if any(other.get(key) != identity[key] for other in alike)]
        names.append(", ".join([name, *(f"{key} {identity[key]}" for key in differing)]))
    return names


def _suites(name: str, runs: Sequence[Run], notes: list[str]) -> list[Suite]:
    policies = _agreed(runs, "policies", recorded_options, "rule")
    metrics = _agreed(runs, "tasks", lambda task: str(task["metric"]), "metric")
    setting = Setting(name, str(runs[0].meta["model"]["name"]), policies, metrics)
    suites: dict[tuple[str, int | None], Suite] = {}
    for record in _merge(runs, notes):
        benchmark = record.task.partition(":")[0]
        suite = suites.setdefault((benchmark, record.length), Suite(setting, benchmark, record.length, {}))
        arm = Arm(record.policy, record.compression, record.budget_asked)
        suite.records.setdefault((arm, record.task), {})[record.index] = record
    return [suites[key] for key in sorted(suites, key=lambda key: (key[0], key[1] or 0))]


def _agreed(runs: Sequence[Run], key: str, read: Callable[[Any], Any], what: str) -> dict[str, Any]:
    """The policies or tasks of all runs. Raises ValueError where one name stands for two things."""
    known: dict[str, tuple[Any, Path]] = {}
    for run in runs:
        for name, value in run.meta[key].items():
            _agree(known, name, read(value), run.folder, f"{name!r} is one {what}")
    return {name: value for name, (value, _) in known.items()}


def _merge(runs: Sequence[Run], notes: list[str]) -> list[Record]:
    """Each record once. Raises ValueError where two of the same prompt, or answer, differ."""
    records: dict[tuple[Any, ...], Record] = {}
    prompts: dict[Any, tuple[Any, Path]] = {}
    answers: dict[Any, tuple[Any, Path]] = {}
    for run in runs:
        for record in run.records:
            sample, prompt = _sample(record), (record.prompt_sha256, record.references)
            answer = {name: value for name, value in vars(record).items() if name not in VARYING}
            _agree(prompts, record.key[:3], prompt, run.folder, f"{sample} is one prompt")
            _agree(answers, record.key, answer, run.folder, f"{record.policy} on {sample} gave one answer")
            records.setdefault(record.key, record)
    if repeated := sum(len(run.records) for run in runs) - len(records):
        notes.append(f"{repeated} records are there twice, with the same answer: counted once.")
    return list(records.values())


def _agree(known: dict[Any, tuple[Any, Path]], key: Any, value: Any, folder: Path, what: str) -> None:
    """Note a value, or raise ValueError where another folder has another one."""
    other, where = known.setdefault(key, (value, folder))
    if other != value:
        raise ValueError(f"{what} in {where} and another in {folder}")


def _sample(record: Record) -> str:
    return f"{record.task}, length {record.length}, sample {record.index}"
