"""Every benchmark by its name, and the tasks that a command line asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import chains, longbench, needle, ruler
from .essays import Essays
from .task import Prompting, Task


@dataclass(frozen=True)
class Setting:
    """What tasks are made of."""

    prompting: Prompting
    max_positions: int
    """Of the model: prompts about documents are cut to it."""
    seed: int
    essays: Essays | None
    """There where a task needs them."""
    data: Path | None
    """A folder with the files of all benchmarks that have data; None: the hub has them."""


@dataclass(frozen=True)
class Benchmark:
    tasks: Sequence[str]
    """Names as a command line has them: `ruler:vt`."""
    needs: Sequence[str]
    """What it can be told: `lengths`, where its tasks make prompts of any length, `essays`, `data`."""
    make: Callable[[str, Setting], Task]
    """The task of such a name. Raises ValueError, or OSError, for data that are missing or wrong."""
    paper_tasks: Sequence[str] | None = None
    """Those of the method's paper, where these are not all: the benchmark's name stands for them."""


BENCHMARKS = {
    "ruler": Benchmark(
        ruler.TASKS,
        ("lengths", "essays", "data"),
        lambda name, s: ruler.make(name, s.prompting.count, s.seed, s.essays, s.data),
    ),
    "longbench": Benchmark(
        longbench.TASKS,
        ("data",),
        lambda name, s: longbench.LongBench(name, s.prompting, s.max_positions, s.data),
        longbench.PAPER_TASKS,
    ),
    "longbench-v2": Benchmark(
        longbench.V2_TASKS,
        ("data",),
        lambda name, s: longbench.LongBenchV2(s.prompting, s.max_positions, s.data),
    ),
    "niah": Benchmark(
        needle.TASKS, ("lengths", "essays"), lambda name, s: needle.NeedleGrid(s.prompting, s.essays)
    ),
    "chains": Benchmark(chains.TASKS, ("lengths",), lambda name, s: chains.Chains(name, s.prompting, s.seed)),
}


def benchmark(task: str) -> Benchmark:
    """The benchmark of `benchmark:task`. Raises ValueError for one that does not exist."""
    name = task.partition(":")[0]
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; choose from {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def expand(names: Sequence[str]) -> list[str]:
    """The tasks that names of tasks and benchmarks stand for, once each. Raises ValueError for others."""
    tasks: dict[str, None] = {}
    for name in names:
        found = benchmark(name)
        if name in found.tasks:
            tasks[name] = None
        elif name in BENCHMARKS:
            tasks |= dict.fromkeys(found.paper_tasks or found.tasks)
        else:
            raise ValueError(f"unknown task {name!r}; choose from {', '.join(found.tasks)}")
    return list(tasks)


def needing(need: str, tasks: Sequence[str]) -> list[str]:
    """Those of the tasks that can be told their `lengths`, `essays`, `data`."""
    return [task for task in tasks if need in benchmark(task).needs]


def make_tasks(names: Sequence[str], setting: Setting) -> list[Task]:
    """Raises what `Benchmark.make` does."""
    return [benchmark(name).make(name, setting) for name in names]
