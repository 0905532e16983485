"""What is measured: a contender's interface, decode steps in turns, and the numbers that become of them."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inertiakv import EvictionConfig
from inertiakv.models import Transformer
from inertiakv.scripts.cli.program import say

from . import machine, traffic

WARM_UP_PERIODS = 3
"""How often a contender's schedule runs before it is measured, to compile, capture graphs and warm caches."""
BLOCK_MS = 1000
"""Slow contenders run fewer steps per turn, so that a turn takes about this long."""


@dataclass(frozen=True)
class Case:
    """One setting, in which all contenders are measured side by side."""

    model: Transformer
    raw: dict[str, Any]
    """The model's config.json."""
    context: int
    batch: int
    new_tokens: int
    """The most tokens that a contender generates."""
    kept: EvictionConfig
    """What rivals keep that evict. Policies have rules of their own."""
    skip_prefill: bool
    """Fill the cache with random K and V instead of running the prompt through the model."""
    compile: bool
    attention: str

    @property
    def budget(self) -> int:
        """Tokens that a rival keeps in the longest row."""
        return self.kept.budget_for(self.context)

    @property
    def lengths(self) -> list[int]:
        """Prompt tokens of each row, evenly spread from the context down to half of it."""
        half, others = self.context // 2, max(1, self.batch - 1)
        return [max(1, self.context - row * half // others) for row in range(self.batch)]

    def prompts(self) -> list[list[int]]:
        """Random tokens."""
        generator = torch.Generator().manual_seed(self.context)
        vocab = self.model.config.vocab_size
        return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in self.lengths]


class Contender(ABC):
    """An implementation with a policy in one case, and its times in milliseconds."""

    period = 1
    """Steps after which the schedule repeats."""
    how = "prefill"
    """How it started: "prefill", "synthetic prompt", or "evicted cache" if not even a synthetic prompt fits
    into memory."""
    first_token_ms: float | None = None
    """Prefill and the first token, without compiling. None without prefill."""
    first_step_ms: float | None = None
    """The step that takes in the first token and evicts the prompt down to its budget."""
    peak_bytes: int | None = None
    """How far memory use rose while it started."""
    warm_up_ms = 0.0
    last_ms = 0.0
    """The last step of the warm-up: the best guess of a step's time before any is measured."""
    steps_per_sample = 1
    """A sample is one step, or the mean of a period of the schedule or of a whole block."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.case, self.device = name, case, case.model.device
        self.rounds: list[list[float]] = []
        """Samples of each round."""

    @abstractmethod
    def start(self) -> None:
        """Take in the prompt, choose the first token, and evict. Raises MemoryError if it does not fit."""

    @abstractmethod
    def steps(self, count: int) -> list[float]:
        """Run `count` decode steps. Returns the milliseconds of each, or only their mean if timing each one
        would slow them down."""

    @abstractmethod
    def kept(self) -> list[int]:
        """Tokens in the cache, by row."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes allocated for K and V."""

    def extra(self) -> dict[str, Any]:
        """Further entries for the results, once it has been measured."""
        return {}

    @property
    def samples(self) -> list[float]:
        return [ms for samples in self.rounds for ms in samples]

    @property
    def compile_seconds(self) -> float:
        """How much longer the warm-up took than the same number of later steps."""
        later_ms = warm_up_steps(self.period) * statistics.median(self.samples)
        return max(0.0, self.warm_up_ms - later_ms) / 1000


def warm_up_steps(period: int) -> int:
    """Steps before the first one that is measured."""
    return WARM_UP_PERIODS * period + 1


def begin(contender: Contender) -> None:
    """Start a contender, compile its steps and warm up. Raises what the contender raises."""
    say(f"{contender.name}: prompt ...")
    before = machine.start_peak(contender.device)
    contender.start()
    contender.peak_bytes = machine.peak_since(before, contender.device)
    say(f"{contender.name}: first steps ...")
    clock = time.perf_counter()
    contender.last_ms = contender.steps(warm_up_steps(contender.period))[-1]
    contender.warm_up_ms = 1000 * (time.perf_counter() - clock)


def run_rounds(contenders: Sequence[Contender], rounds: int, steps: int, read: Callable[[], float]) -> float:
    """In each round, let every contender run a block of at most `steps` steps.

    Who begins changes from round to round, so that the state a contender leaves in the CPU's caches affects
    all alike. `read` measures the memory bandwidth once per round. Returns its median in bytes/s.
    """
    speeds = []
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds} ...")
        speeds.append(read())
        first = turn % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            count = block_steps(contender, steps)
            samples = by_period(contender.steps(count), contender.period, count)
            contender.steps_per_sample = count // len(samples)
            contender.rounds.append(samples)
    return statistics.median(speeds)


def block_steps(contender: Contender, most: int) -> int:
    """Steps of a contender's next block: whole periods, `most` or fewer if they are slow."""
    expected_ms = statistics.median(contender.samples or [contender.last_ms])
    return max(
        contender.period, min(most, int(BLOCK_MS / expected_ms)) // contender.period * contender.period
    )


def by_period(times: list[float], period: int, steps: int) -> list[float]:
    """The mean of each period, so that every sample has its share of the schedule's expensive steps."""
    if len(times) != steps or period == 1:
        return times
    return [statistics.fmean(times[i : i + period]) for i in range(0, steps, period)]


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, and 10th and 90th percentile."""
    median, p10, p90 = np.percentile(samples, [50, 10, 90])
    return {"median": float(median), "p10": float(p10), "p90": float(p90)}


def ratio(contender: Contender, reference: Contender) -> float:
    """A contender's time relative to the reference's: the median over rounds, since both were measured within
    seconds of each other in each of them."""
    pairs = zip(contender.rounds, reference.rounds, strict=True)
    return statistics.median(statistics.median(own) / statistics.median(other) for own, other in pairs)


def entry(
    contender: Contender, setting: dict[str, Any], reference: Contender | None, speed: float
) -> dict[str, Any]:
    """One contender in the results file. `setting`: dtype, batch and context; `speed`: the memory bandwidth
    in bytes/s."""
    case, kept = contender.case, contender.kept()
    ms = {name: round(value, 4) for name, value in spread(contender.samples).items()}
    step_bytes = traffic.step_bytes(case.model, kept)
    return {
        "name": contender.name,
        **setting,
        "lengths": case.lengths,
        "start": contender.how,
        "ms_per_step": ms,
        "samples": len(contender.samples),
        "steps_per_sample": contender.steps_per_sample,
        "ratio": None if reference is None else round(ratio(contender, reference), 4),
        "tokens_per_second": round(1000 * case.batch / ms["median"], 3),
        "bytes_per_step": step_bytes,
        "read_gb_per_s": round(speed / 1e9, 2),
        "share_of_limit": round(1000 * step_bytes / speed / ms["median"], 4),
        "cache_bytes": contender.cache_bytes(),
        "cache_bytes_by_formula": traffic.kv_bytes(case.model.config, kept, case.model.dtype),
        "kept_tokens": sum(kept),
        "kept_tokens_by_row": kept,
        "first_token_ms": contender.first_token_ms and round(contender.first_token_ms, 3),
        "first_step_ms": contender.first_step_ms and round(contender.first_step_ms, 3),
        "compile_seconds": round(contender.compile_seconds, 3),
        "peak_bytes": contender.peak_bytes,
        **contender.extra(),
    }
