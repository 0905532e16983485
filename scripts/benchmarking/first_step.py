"""Where the time of the step that scores a whole prompt and evicts it goes.

It runs once a prompt, uncompiled: as operators, which PyTorch's profiler times one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from inertiakv.decoding.conversation import Conversation

from .ours import Ours

REPEATS = 5
METHOD = (
    f"{REPEATS} prompts of random K and V, the median; of one more, which the profiler slows down, each "
    "operator's own time as a share; host: what remains"
)
GROUPS = {
    "matrix_products": ("mm", "addmm", "bmm", "baddbmm", "mv", "linear", "_weight_int8pack_mm"),
    "conversions_and_copies": ("copy_", "cat"),
    "gathers_and_scatters": ("gather", "index", "index_select", "scatter_", "_index_put_impl_"),
    "sorting": ("sort", "topk"),
}
"""Operators whose time is told apart from others', by the end of their names."""


@torch.no_grad()
def break_down(contender: Ours) -> dict[str, Any]:
    """Milliseconds of the parts of a policy's first step, in the contender's case."""
    case = dataclasses.replace(contender.case, skip_prefill=True)

    def first_step() -> float:
        milliseconds = Ours(contender.name, contender.eviction, case).start().first_step_ms
        assert milliseconds is not None
        return milliseconds

    first_step()  # the library makes its kernels, and memory is handed out, the first time
    median = statistics.median(first_step() for _ in range(REPEATS))
    with _profiled() as runs:
        first_step()
    seconds, operators = 0.0, dict.fromkeys([*GROUPS, "other_operators"], 0.0)
    for elapsed, run in runs:
        seconds += elapsed
        for event in run.key_averages():
            on_device = contender.device.type == "cuda"
            own = event.self_device_time_total if on_device else event.self_cpu_time_total
            operators[group(event.key)] += own / 1e6
    parts = operators | {"host": max(0.0, seconds - sum(operators.values()))}
    whole = sum(parts.values())
    return {"method": METHOD, "ms": {part: round(median * own / whole, 4) for part, own in parts.items()}}


def group(operator: str) -> str:
    """The part of a step that an operator belongs to."""
    name = operator.rsplit("::", 1)[-1]
    return next((part for part, names in GROUPS.items() if name in names), "other_operators")


@contextlib.contextmanager
def _profiled() -> Iterator[list[tuple[float, profile]]]:
    """First steps in here are profiled: the seconds of each, and what the profiler says."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no line for each start and stop
    runs: list[tuple[float, profile]] = []
    timed = Conversation.timed

    @contextlib.contextmanager
    def timed_and_profiled(conversation: Conversation, part: Any) -> Iterator[None]:
        if part != "first_step":
            with timed(conversation, part):
                yield
            return
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with profile(activities=activities) as run:
            with timed(conversation, part):
                begin = time.perf_counter()
                yield
            elapsed = time.perf_counter() - begin
        runs.append((elapsed, run))

    with patch.object(Conversation, "timed", timed_and_profiled):
        yield runs
