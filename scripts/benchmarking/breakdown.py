"""Where time goes, by part: of a decode step, and of the first step.

A decode step is compiled once as a whole and once without each part. What it saves without a part is that
part's time. Eviction is too short for that and is repeated instead. Scoring is a step that refreshes less one
that does not; the host's share is `Decoder.decode` less the compiled step. The rest is projections, norms,
RoPE and cache writes.

The first step scores the whole prompt and evicts it. It runs once per prompt, uncompiled, so PyTorch's
profiler can time its operators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from inertiakv.compiling.graphs import Graphs
from inertiakv.decoding import forward
from inertiakv.decoding.batch import BatchState
from inertiakv.decoding.generation import Conversation
from inertiakv.decoding.steps import decode_step
from inertiakv.models.layers import MLP
from inertiakv.models.moe import SparseMLP
from inertiakv.models.transformer import Transformer

from . import machine, traffic
from .measure import Say
from .ours import Ours

ROUNDS, STEPS = 24, 4
"""Turns of each variant of a step, and the least steps of a turn."""
WARM_UP = 3
AGAIN = 16
"""How often eviction is repeated."""
STEP_METHOD = (
    "each part left out of the compiled step in turn, the time that it saves; eviction: done "
    f"{AGAIN} times more, what each takes; scoring: a step that refreshes less one that does not; rest: what "
    "remains of the step; host: decode() less the compiled step"
)
REPEATS = 5
FIRST_STEP_METHOD = (
    f"{REPEATS} prompts of random K and V, the median; of one more, which the profiler slows down, each "
    "operator's own time as a share; host: what remains"
)
GROUPS = {
    "matrix_products": ("mm", "addmm", "bmm", "baddbmm", "mv", "linear", "_weight_int8pack_mm"),
    "conversions_and_copies": ("copy_", "cat"),
    "gathers_and_scatters": ("gather", "index", "index_select", "scatter_", "_index_put_impl_"),
    "sorting": ("sort", "topk"),
}
"""Operators of the first step by the part that they belong to; all others are one part."""


# Everything that depends on the decoder's internals stands here: what replaces which function, how one
# compiled step is run, and where the first step is profiled.

_evict_one = forward.evict_one


def _evict_again(*args: Any) -> None:
    """Only the first call changes anything, but the others take as long."""
    for _ in range(1 + AGAIN):
        _evict_one(*args)


def _no_head(batch: BatchState, hidden_BE: Tensor, *, greedy: bool) -> None:
    batch.top_p_B.copy_(hidden_BE[:, 0])  # unused by greedy steps; without a use the layers were dead code


PARTS: dict[str, tuple[tuple[Any, str, Callable[..., Any]], ...]] = {
    "attention": (
        (forward, "dense_step", lambda q_BHD, *_: (q_BHD, None)),
        (forward, "flex", lambda q_BHTD, *_: q_BHTD),
    ),
    "mlp": (
        (MLP, "forward", lambda mlp, x: x),
        (SparseMLP, "forward", lambda mlp, x: x),
    ),
    "head_and_sampling": (
        (Transformer, "head", lambda model, hidden: hidden),
        (BatchState, "choose", _no_head),
    ),
    "eviction": ((forward, "evict_one", _evict_again),),
}
"""What replaces the functions of each part: owner, name and replacement."""


@contextlib.contextmanager
def changed(part: str | None) -> Iterator[None]:
    """Replace the functions of a part, if any, in steps that are compiled in here."""
    with contextlib.ExitStack() as stack:
        for owner, function, replacement in PARTS[part] if part else ():
            stack.enter_context(patch.object(owner, function, replacement))
        yield


def run_step(contender: Ours, graphs: Graphs, name: str, refresh: bool) -> None:
    """One decode step. `name` is its key among the graphs."""
    decoder = contender.decoder
    assert decoder.cache is not None
    if decoder.rule.refresh_due is not None:
        decoder.rule.refresh_due.fill_(True)
    args = (decoder.model, decoder.cache, decoder.batch, decoder.rule, None)
    graphs.run((name,), decode_step, *args, scores=refresh, greedy=True)


@contextlib.contextmanager
def _first_steps_profiled() -> Iterator[list[profile]]:
    """Collect a profile of every first step that runs in here."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no line for each start and stop
    runs: list[profile] = []
    timed = Conversation.timed
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []

    @contextlib.contextmanager
    def profiled(conversation: Conversation, part: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if part == "first_step":
                runs.append(stack.enter_context(profile(activities=activities)))
            with timed(conversation, part):
                yield

    with patch.object(Conversation, "timed", profiled):
        yield runs


def steps_needed(period: int) -> int:
    """How many decode steps `of_step` runs."""
    return (len(PARTS) + 3) * (WARM_UP + ROUNDS * _steps_per_turn(period))


def _steps_per_turn(period: int) -> int:
    """At least STEPS, in whole periods."""
    return math.ceil(STEPS / period) * period


@torch.no_grad()
def of_step(contender: Ours, say: Say) -> dict[str, Any]:
    """Milliseconds of the parts of a contender's average decode step. The contender must have started, and
    its cache is of no use for anything else afterwards."""
    variants: dict[str, tuple[bool, str | None]] = {"whole": (False, None)}
    if contender.refresh_share:
        variants["refresh"] = (True, None)
    variants |= {part: (False, part) for part in PARTS}
    graphs = Graphs(contender.decoder.graphs.enabled, contender.device)

    def run(name: str, steps: int) -> float:
        """Milliseconds per step of a variant."""
        refresh, part = variants[name]
        with changed(part):
            machine.synchronize(contender.device)
            begin = time.perf_counter()
            for _ in range(steps):
                run_step(contender, graphs, name, refresh)
            machine.synchronize(contender.device)
            return 1000 * (time.perf_counter() - begin) / steps

    for number, name in enumerate(variants, start=1):
        say(f"{contender.name}: parts of a step, {number} of {len(variants)}: {name.replace('_', ' ')} ...")
        run(name, WARM_UP)
    steps = _steps_per_turn(contender.period)
    rounds = [
        [statistics.fmean(contender.steps(steps)), *(run(name, steps) for name in variants)]
        for _ in range(ROUNDS)
    ]
    # Differences are taken within each round.
    times = dict(zip(["decode", *variants], torch.tensor(rounds, dtype=torch.float64).T, strict=True))
    whole = times["whole"]
    scoring = contender.refresh_share * (times.get("refresh", whole) - whole)
    savings = {part: whole - times[part] for part in PARTS}
    savings["eviction"] /= -AGAIN
    parts = {part: _typical(saving) for part, saving in savings.items()}
    parts["rest"] = max(0.0, _typical(whole) - sum(parts.values()))
    parts["scoring"] = _typical(scoring)
    parts["host"] = _typical(times["decode"] - whole - scoring)
    ms = {part: round(value, 4) for part, value in parts.items()}
    return {"method": STEP_METHOD, "ms": ms, "at_least_ms": at_least(contender)}


def _typical(milliseconds: Tensor) -> float:
    """The median, but not less than zero."""
    return max(0.0, float(milliseconds.quantile(0.5)))


def at_least(contender: Ours) -> dict[str, float]:
    """Milliseconds of the reading that a step cannot do without, and on a CPU of its arithmetic in float32:
    at the speeds of PyTorch, measured now."""
    model, kept, device = contender.case.model, contender.kept(), contender.device
    least = {"reading": traffic.step_bytes(model, kept) / machine.measure_read(device)}
    if device.type == "cpu":
        least["arithmetic"] = traffic.step_flops(model, kept) / machine.measure_multiply(device)
    return {what: round(1000 * seconds, 4) for what, seconds in least.items()}


@torch.no_grad()
def of_first_step(contender: Ours) -> dict[str, Any]:
    """Milliseconds of the parts of a policy's first step, in the contender's case."""
    case = dataclasses.replace(contender.case, skip_prefill=True)

    def first_step() -> float:
        fresh = Ours(contender.name, case, contender.eviction)
        fresh.start()
        assert fresh.first_step_ms is not None
        return fresh.first_step_ms

    first_step()  # the first one also compiles kernels and allocates memory
    median = statistics.median(first_step() for _ in range(REPEATS))
    with _first_steps_profiled() as runs:
        profiled = first_step()
    parts = dict.fromkeys([*GROUPS, "other_operators"], 0.0)
    for event in (event for run in runs for event in run.key_averages()):
        on_device = contender.device.type == "cuda"
        own = event.self_device_time_total if on_device else event.self_cpu_time_total
        parts[group(event.key)] += own / 1000
    parts["host"] = max(0.0, profiled - sum(parts.values()))
    scale = median / sum(parts.values())
    return {"method": FIRST_STEP_METHOD, "ms": {part: round(scale * own, 4) for part, own in parts.items()}}


def group(operator: str) -> str:
    """The part of the first step that an operator belongs to."""
    name = operator.rsplit("::", 1)[-1]
    return next((part for part, names in GROUPS.items() if name in names), "other_operators")
