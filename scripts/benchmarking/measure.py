"""Contenders side by side: who is measured when, and what is made of the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .contender import Contender, Start
from .machine import Peak

Say = Callable[[str], None]

WARM_UP_PERIODS = 3
"""Times that a schedule is run through before it is measured: compiled, captured, settled."""
BLOCK_MS = 1000
"""Slow contenders make fewer steps at a turn than others: about so many milliseconds' worth."""


@dataclass
class Measured:
    """One contender's numbers: milliseconds of its steps, round by round."""

    contender: Contender
    start: Start
    peak_bytes: int | None
    """By how much memory rose while the prompt was taken in and evicted."""
    warm_up_ms: float = 0.0
    warm_up_steps: int = 0
    last_ms: float = 0.0
    """The last of them: how long a step takes, as far as is known before any is measured."""
    rounds: list[list[float]] = field(default_factory=list)
    steps_per_sample: int = 1
    """A sample is a step's time, or the mean of so many: of a period of the schedule, or of a block."""

    @property
    def samples(self) -> list[float]:
        return [ms for samples in self.rounds for ms in samples]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def compile_seconds(self) -> float:
        """What the first steps took longer than the same number of later ones."""
        return max(0.0, self.warm_up_ms - self.warm_up_steps * self.median) / 1000


def warm_up_steps(period: int) -> int:
    """Steps before those that are measured: each kind of step several times, and one that ends a schedule."""
    return WARM_UP_PERIODS * period + 1


def begin(contender: Contender, device: torch.device, say: Say) -> Measured:
    """Take in a contender's prompt, compile its steps and warm them up. Raises what the contender raises."""
    say(f"{contender.name}: prompt ...")
    with Peak(device) as peak:
        start = contender.start()
    measured = Measured(contender, start, peak.bytes)
    say(f"{contender.name}: first steps ...")
    measured.warm_up_steps = warm_up_steps(contender.period)
    clock = time.perf_counter()
    measured.last_ms = contender.steps(measured.warm_up_steps)[-1]
    measured.warm_up_ms = 1000 * (time.perf_counter() - clock)
    contender.settled()
    return measured


def run_rounds(
    contenders: Sequence[Measured], rounds: int, steps: int, read: Callable[[], float], say: Say
) -> float:
    """Let each contender make a block of steps in turn, as many rounds as are wanted. Who begins changes from
    round to round, so that what one leaves behind in the machine's caches hits all alike. Bytes a second that
    the machine reads with, which `read` measures, take part, since they change as well: returned is their
    median."""
    speeds = []
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds} ...")
        speeds.append(read())
        first = turn % len(contenders)
        for measured in [*contenders[first:], *contenders[:first]]:
            count = block_steps(measured, steps)
            times = measured.contender.steps(count)
            samples = by_period(times, measured.contender.period, count)
            measured.steps_per_sample = count // len(samples)
            measured.rounds.append(samples)
    return statistics.median(speeds)


def block_steps(measured: Measured, most: int) -> int:
    """Steps of a contender's next block: whole periods, `most` at the most, fewer where they are slow."""
    period = measured.contender.period
    expected_ms = measured.median if measured.rounds else measured.last_ms
    return max(period, min(most, int(BLOCK_MS / expected_ms)) // period * period)


def by_period(times: list[float], period: int, steps: int) -> list[float]:
    """Means of whole periods of a schedule, so that its dearer steps have their share in every sample."""
    if len(times) != steps or period == 1:
        return times
    return [statistics.fmean(times[i : i + period]) for i in range(0, steps, period)]


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, and the tenth and ninetieth percentiles."""
    p10, median, p90 = torch.tensor(samples, dtype=torch.float64).quantile(
        torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    )
    return {"median": float(median), "p10": float(p10), "p90": float(p90)}


def ratio(measured: Measured, reference: Measured) -> float:
    """A contender's time over the reference's, the median of what the rounds say, each of which compares what
    was measured within seconds."""
    pairs = zip(measured.rounds, reference.rounds, strict=True)
    return statistics.median(statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs)
