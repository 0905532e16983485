"""A suite: all results that can be compared, of one benchmark at one length with one model."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from inertiakv import EvictionConfig, policy
from inertiakv.evals.records import Record
from inertiakv.evals.rules import KEPT, label, parse_policy
from inertiakv.evals.statistics import Comparison, Estimate, Strata, compare, estimate

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


def _options(config: EvictionConfig) -> Options:
    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    return {name: value for name, value in fields.items() if name not in KEPT}


INERTIAKV = _options(EvictionConfig())
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
    return None if config is None else _options(config)


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

    def compare(self, arm: Arm, other: Arm, task: str | None = None) -> Comparison | None:
        """None where they have no sample in common."""
        differences = self.differences(arm, other, task)
        return compare(differences) if differences else None

    def partner(self, arm: Arm, policy: str) -> Arm | None:
        """The arm of that policy that this one is to be compared with: at its budget, or the full cache."""
        candidates = (arm.at_its_budget(policy), Arm(policy, None, None))
        return next((one for one in candidates if one in self.arms and one != arm), None)
