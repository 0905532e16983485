"""Every benchmark by its name, and the tasks that a command line asks for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .essays import Essays
from .prompting import Prompting
from .task import Task


@dataclass(frozen=True)
class Setting:
    """What tasks are made of."""

    prompting: Prompting
    max_positions: int
    """Of the model: what data-bound prompts are truncated to."""
    seed: int
    samples: int | None
    essays: Essays | None
    """None where no task needs any."""
    data: Path | None
    """A folder with the files of all benchmarks that have data; None: the hub has them."""


@dataclass(frozen=True)
class Benchmark:
    """A module with `TASKS`, the names of its tasks as a command line has them, `ruler:vt`, and `make`, which
    takes such a name."""

    module: str
    needs: tuple[str, ...]
    """What it can be told: `lengths`, where its tasks make prompts of any length, `essays`, `data`."""
    options: Callable[[Setting], dict[str, Any]]
    """What its `make` takes beside a name."""

    def tasks(self, listed: str = "TASKS") -> Sequence[str]:
        module = importlib.import_module(self.module)
        names: Sequence[str] = getattr(module, listed, module.TASKS)
        return names

    def make(self, name: str, setting: Setting) -> Task:
        task: Task = importlib.import_module(self.module).make(name, **self.options(setting))
        return task


def _of_data(setting: Setting) -> dict[str, Any]:
    return {"prompting": setting.prompting, "max_positions": setting.max_positions, "data": setting.data}


def _of_seed(setting: Setting) -> dict[str, Any]:
    return {"prompting": setting.prompting, "seed": setting.seed}


def _niah(setting: Setting) -> dict[str, Any]:
    from .needle import DEPTHS

    # Each round goes through all depths.
    rounds = -(-(setting.samples or 1) // len(DEPTHS))
    return {**_of_seed(setting), "essays": setting.essays, "rounds": rounds}


def _ruler(setting: Setting) -> dict[str, Any]:
    texts = {"essays": setting.essays, "data": setting.data}
    return {"count_tokens": setting.prompting.count, "seed": setting.seed, **texts}


BENCHMARKS = {
    "ruler": Benchmark("inertiakv.evals.ruler", ("lengths", "essays", "data"), _ruler),
    "longbench": Benchmark("inertiakv.evals.longbench", ("data",), _of_data),
    "longbench-v2": Benchmark("inertiakv.evals.longbench_v2", ("data",), _of_data),
    "niah": Benchmark("inertiakv.evals.needle", ("lengths", "essays"), _niah),
    "chains": Benchmark("inertiakv.evals.chains", ("lengths",), _of_seed),
}


def benchmark(task: str) -> Benchmark:
    """The benchmark of `benchmark:task`. Raises ValueError for one that there is not."""
    name = task.partition(":")[0]
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; choose from {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def expand(names: Sequence[str]) -> list[str]:
    """The tasks that names of tasks and benchmarks stand for, each once. Raises ValueError for a name that is
    neither."""
    tasks: dict[str, None] = {}
    for name in names:
        of = benchmark(name)
        if name in of.tasks():
            tasks[name] = None
        elif name in BENCHMARKS:
            tasks |= dict.fromkeys(of.tasks("PAPER_TASKS"))  # where it has more than its paper
        else:
            raise ValueError(f"unknown task {name!r}; choose from {', '.join(of.tasks())}")
    return list(tasks)


def needing(need: str, tasks: Sequence[str]) -> list[str]:
    """Those of the tasks that can be told their `lengths`, `essays`, `data`."""
    return [task for task in tasks if need in benchmark(task).needs]


def make_tasks(names: Sequence[str], setting: Setting) -> list[Task]:
    """Raises ValueError, or OSError, for data that are missing or wrong."""
    return [benchmark(name).make(name, setting) for name in names]
