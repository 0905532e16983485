"""Put the paper's claims to the test: run its comparisons, and make one report of them.

`--scale small` asks SmolLM2-135M what of RULER it can answer at all, at 1k and 2k tokens, in about an hour on
two CPU cores. `--scale full` is the paper's setup, for a model of its size on a GPU. Both run every named
policy, the smoothing (alpha), the compression, the laziness of refreshes, the couplings of layers and steps,
and the scorers.

Examples:
  make reproduce
  python scripts/reproduce.py --out results/small
  python scripts/reproduce.py --model meta-llama/Llama-3.1-8B-Instruct --scale full --out results/llama

Each part is a run of scripts/eval.py in a folder of its own, whose command is printed; the report is that of
scripts/report.py over all of them. What was stopped goes on with the same command: no answer is asked for
twice.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's own packages, installed or not

from inertiakv import POLICIES
from inertiakv.evals import registry
from inertiakv.scripts import eval as evaluation
from inertiakv.scripts import report
from inertiakv.scripts.cli import program
from inertiakv.scripts.cli.arguments import Option, parse
from inertiakv.scripts.cli.program import say

ALPHAS = (0.0, 0.3, 0.6, 0.9, 0.95)
"""Beside the default, 0.8."""
COUPLINGS = ("temporal", "layer")
MEMORY = "inertiakv:coupling=temporal:step_alpha=0.95"
"""A memory over tens of steps, which alpha alone has not in a deep model."""
POOLED = ("inertiakv:pool=13", "lazy4:pool=13", "score_free:pool=13")
SWEPT = ("inertiakv", "lazy4", "tova", "snapkv", "keydiff", "streaming_llm")
"""Policies that are run at every compression."""
SCORERS = ("value_norm", "entropy", "keydiff", "key_norm", "recency")
"""Beside attention, whose order two of them have much like it, and the others not."""
COSTLY = "kvzip"
"""Reads each prompt more than twice again: run on fewer samples."""

NAMED = (
    *(name for name in POLICIES if name != COSTLY),
    *(f"inertiakv:alpha={alpha}" for alpha in ALPHAS),
    *(f"inertiakv:coupling={coupling}" for coupling in COUPLINGS),
    *(f"inertiakv:scorer={scorer}" for scorer in SCORERS),
    MEMORY,
    *POOLED,
)
COMPRESSIONS = (0.5, 0.75, 0.95)
"""Beside the default, 0.9."""


@dataclass(frozen=True)
class Part:
    """One run of scripts/eval.py, all of whose rules answer the same prompts."""

    tasks: tuple[str, ...]
    policies: Sequence[str]
    lengths: tuple[int, ...] = ()
    samples: int | None = None
    compressions: tuple[float, ...] = (0.9,)

    def arguments(self) -> list[str]:
        given = {
            "tasks": ",".join(self.tasks),
            "lengths": ",".join(map(str, self.lengths)) or None,
            "samples": self.samples,
            "policies": ",".join(self.policies),
            "compression": ",".join(map(str, self.compressions)),
        }
        return [f"--{name}={value}" for name, value in given.items() if value is not None]


RULER_SMALL = tuple(
    f"ruler:niah_{name}" for name in ("single_1", "single_2", "single_3", "multivalue", "multiquery")
)
"""Of the 13 tasks those in which SmolLM2-135M with its full cache is right more often than not."""


def small() -> dict[str, Part]:
    def part(policies: Sequence[str], samples: int, compressions: tuple[float, ...] = (0.9,)) -> Part:
        return Part(RULER_SMALL, policies, (1024, 2048), samples, compressions)

    return {
        "policies": part(NAMED, 8),
        "compressions": part(SWEPT, 8, COMPRESSIONS),
        COSTLY: part((COSTLY,), 4),
    }


def full() -> dict[str, Part]:
    return {
        "ruler": Part(("ruler",), (*NAMED, COSTLY), (4096, 16384), 500),
        "ruler-compressions": Part(("ruler",), SWEPT, (4096, 16384), 500, COMPRESSIONS),
        "longbench": Part(("longbench",), (*NAMED, COSTLY)),
        "longbench-compressions": Part(("longbench",), SWEPT, (), None, COMPRESSIONS),
        "longbench-v2": Part(("longbench-v2",), ("full", *SWEPT, COSTLY)),
        "needle": Part(("niah",), ("full", *SWEPT, COSTLY), (4096, 8192, 16384, 32768), 11),
    }


@dataclass(frozen=True)
class Arguments:
    """What to run, and where its results go."""

    model: str = "smollm2-135m"
    """A folder, a name on the Hugging Face hub, or smollm2-135m."""
    scale: Literal["small", "full"] = "small"
    """About an hour on two cores, or the paper's setup."""
    out: Annotated[Path, Option(metavar="DIR")] = Path("results/reproduction")
    """A folder for the parts and the report."""
    batch: Annotated[int | None, Option(default="8 small, 4 full")] = None
    """Prompts that are read and answered together."""
    data: Annotated[Path | None, Option(metavar="DIR")] = None
    """The folder with the files of all benchmarks that have data (LongBench, LongBench-v2, SQuAD, HotpotQA);
    else they come from the hub."""


def main(argv: Sequence[str] | None = None) -> int:
    return program.run(lambda: reproduce(parse(Arguments, argv, __doc__)))


def reproduce(args: Arguments) -> None:
    """Run the parts one after the other, and report. Raises ValueError where one of them fails."""
    if args.scale == "small" and args.data is not None:
        raise ValueError("--data has no effect with --scale small, whose prompts are made here")
    start = time.perf_counter()
    parts = small() if args.scale == "small" else full()
    for name, part in parts.items():
        argv = command(args, args.out / name, part)
        say(f"\n{shlex.join(['python', 'scripts/eval.py', *argv])}")
        if evaluation.main(argv):
            raise ValueError(f"the part {name} has failed: see above")
    report.report(report.Arguments(tuple(args.out / name for name in parts), args.out))
    say(f"{(time.perf_counter() - start) / 60:.0f} minutes")


def command(args: Arguments, folder: Path, part: Part) -> list[str]:
    """What scripts/eval.py is told."""
    batch = args.batch or {"small": 8, "full": 4}[args.scale]
    more = []
    if args.data is not None and registry.needing("data", part.tasks):
        more.append(f"--data={args.data}")
    where = [f"--model={args.model}", f"--batch={batch}", f"--out={folder}", "--resume"]
    return [*part.arguments(), *where, *more]


if __name__ == "__main__":
    sys.exit(main())
