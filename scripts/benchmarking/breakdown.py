"""Where the time of a decode step goes, by part.

The step is compiled once as a whole and once without each part. What it saves without a part is that
part's time. Eviction is too short for that and is repeated instead. Scoring is a step that refreshes less one
that does not; the host's share is `Decoder.decode` less the compiled step. The rest is projections, norms,
RoPE and cache writes.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from inertiakv.compiling.graphs import Graphs
from inertiakv.decoding import forward
from inertiakv.decoding.batch import BatchState
from inertiakv.decoding.steps import decode_step
from inertiakv.models.layers import MLP
from inertiakv.models.moe import SparseMLP
from inertiakv.models.transformer import Transformer
from inertiakv.scripts.cli.program import say

from . import machine
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
# Everything that depends on the decoder's internals stands here: what replaces which function, and how one
# compiled step is run.

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


def steps_needed(period: int) -> int:
    """How many decode steps `of_step` runs."""
    return (len(PARTS) + 3) * (WARM_UP + ROUNDS * _steps_per_turn(period))


def _steps_per_turn(period: int) -> int:
    """At least STEPS, in whole periods."""
    return math.ceil(STEPS / period) * period


@torch.no_grad()
def of_step(contender: Ours) -> dict[str, Any]:
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
    return {"method": STEP_METHOD, "ms": ms}


def _typical(milliseconds: Tensor) -> float:
    """The median, but not less than zero."""
    return max(0.0, float(milliseconds.quantile(0.5)))
