"""Where the time of a decode step goes, found by leaving parts out.

The decode step is compiled once whole and once without each part. What a step gets faster by without a part
is that part's time: so much can be gained there, and no more. Eviction is too short for that and is done
again and again instead. What the parts do not add up to is the rest: projections, norms, RoPE, cache writes.
Scoring is a step that refreshes less one that does not, and the host's share is what `Decoder.decode` takes
longer than the bare compiled step.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from inertiakv.cache.retention import RetentionSets
from inertiakv.compiling.graphs import Graphs
from inertiakv.decoding import forward
from inertiakv.decoding.batch import BatchState
from inertiakv.decoding.steps import decode_step
from inertiakv.models.layers import MLP
from inertiakv.models.moe import SparseMLP
from inertiakv.models.transformer import Transformer

from . import machine, traffic
from .machine import synchronize
from .ours import Ours

AGAIN = 16
"""Evictions more than a step needs."""
METHOD = (
    "each part left out of the compiled step in turn, the time that it saves; eviction: done "
    f"{AGAIN} times more, what each takes; scoring: a step that refreshes less one that does not; rest: what "
    "remains of the step; host: decode() less the compiled step"
)
WARM_UP = 3

_evict_one = forward.evict_one


def _evict_again(table: RetentionSets, utility_BXN: Tensor, protected_BXN: Tensor, active_B: Tensor) -> None:
    """Once the slot is free the others change nothing, but that takes them as long."""
    for _ in range(1 + AGAIN):
        _evict_one(table, utility_BXN, protected_BXN, active_B)


def _no_dense_attention(q_BHD: Tensor, *_: object) -> tuple[Tensor, None]:
    return q_BHD, None


def _no_flex_attention(q_BHTD: Tensor, *_: object) -> Tensor:
    return q_BHTD


def _only_look(rows: BatchState, hidden_BE: Tensor, *, greedy: bool) -> None:
    rows.top_p_B.copy_(hidden_BE[:, 0])  # unused by greedy steps; or else the layers would be dead code


PARTS: dict[str, tuple[tuple[Any, str, Callable[..., Any]], ...]] = {
    "attention": (
        (forward, "dense_step", _no_dense_attention),
        (forward, "flex", _no_flex_attention),
    ),
    "mlp": (
        (MLP, "forward", lambda mlp, x: x),
        (SparseMLP, "forward", lambda mlp, x: x),
    ),
    "head_and_sampling": (
        (Transformer, "head", lambda model, hidden: hidden),
        (BatchState, "choose", _only_look),
    ),
    "eviction": ((forward, "evict_one", _evict_again),),
}
"""For each part, what takes the place of the functions that make it up, as far as a step calls them."""


@contextlib.contextmanager
def changed(part: str | None) -> Iterator[None]:
    """Steps that are compiled in here have a part changed, or none."""
    with contextlib.ExitStack() as stack:
        for owner, function, replacement in PARTS[part] if part else ():
            stack.enter_context(patch.object(owner, function, replacement))
        yield


def steps_needed(rounds: int, steps: int) -> int:
    """How many decode steps `break_down` runs."""
    return (len(PARTS) + 3) * (WARM_UP + rounds * steps)


@torch.no_grad()
def break_down(contender: Ours, rounds: int, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds of the parts of a contender's average step, all measured in turns, `steps` at a time (a
    multiple of its period). The contender is under way, and spoilt by this for anything else."""
    variants = {"whole": (False, None), "refresh": (True, None)}
    if not contender.refresh_share:
        del variants["refresh"]
    variants |= {part: (False, part) for part in PARTS}

    graphs = Graphs(contender.decoder.graphs.enabled, contender.device)
    for number, (name, (refresh, part)) in enumerate(variants.items(), start=1):
        say(f"{contender.name}: parts of a step, {number} of {len(variants)}: {name.replace('_', ' ')} ...")
        with changed(part):
            _run(contender, graphs, name, refresh, WARM_UP)
    rows: list[list[float]] = []
    for _ in range(rounds):
        rows.append([statistics.fmean(contender.steps(steps))])
        for name, (refresh, part) in variants.items():
            with changed(part):
                rows[-1].append(_run(contender, graphs, name, refresh, steps))

    # What each round says of a part, and of that the median.
    times = dict(zip(["decode", *variants], torch.tensor(rows, dtype=torch.float64).T, strict=True))
    whole = times["whole"]
    scoring = contender.refresh_share * (times.get("refresh", whole) - whole)
    savings = {part: whole - times[part] for part in PARTS}
    savings["eviction"] /= -AGAIN
    parts = {part: _typical(saving) for part, saving in savings.items()}
    parts["rest"] = max(0.0, _typical(whole) - sum(parts.values()))
    parts["scoring"] = _typical(scoring)
    parts["host"] = _typical(times["decode"] - whole - scoring)
    ms = {part: round(value, 4) for part, value in parts.items()}
    return {"method": METHOD, "ms": ms, "at_least_ms": at_least(contender)}


def at_least(contender: Ours) -> dict[str, float]:
    """Milliseconds of the reading that a step cannot do without, and on a CPU of its arithmetic, which is in
    float32 there: at the speeds of the library, measured now."""
    model, kept, device = contender.case.model, contender.cache().kept, contender.device
    least = {"reading": traffic.step_bytes(model, kept) / machine.measure_read(device)}
    if device.type == "cpu":
        least["arithmetic"] = traffic.step_flops(model, kept) / machine.measure_multiply(device)
    return {what: round(1000 * seconds, 4) for what, seconds in least.items()}


def _typical(milliseconds: Tensor) -> float:
    """The median, and nothing below nothing."""
    return max(0.0, float(milliseconds.quantile(0.5)))


def step(contender: Ours, graphs: Graphs, name: str, refresh: bool) -> None:
    """One decode step, under a name of its own among the graphs."""
    decoder = contender.decoder
    assert decoder.cache is not None
    graphs.run(
        (name,),
        decode_step,
        decoder.model,
        decoder.cache,
        decoder.rows,
        decoder.method,
        decoder.aggregation if refresh else None,
        None,
        None,
        greedy=True,
    )


def _run(contender: Ours, graphs: Graphs, name: str, refresh: bool, steps: int) -> float:
    """Milliseconds of a step of one variant."""
    begin = _now(contender.device)
    for _ in range(steps):
        step(contender, graphs, name, refresh)
    return 1000 * (_now(contender.device) - begin) / steps


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def draw(contenders: Sequence[dict[str, Any]], file: Path, say: Callable[[str], None]) -> None:
    """A bar for each contender of a results file that has a profile, as a picture, if matplotlib is there to
    draw it."""
    try:
        import matplotlib
    except ImportError:
        say("no chart: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    breakdowns = {
        f"{c['name']}, {c['dtype']}\n{c['context']:,} tokens, batch {c['batch']}": c["profile"]["ms"]
        for c in contenders
        if c.get("profile")
    }
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.5 * len(breakdowns)), layout="constrained")
    titles, left = list(breakdowns), [0.0] * len(breakdowns)
    for part in dict.fromkeys(part for ms in breakdowns.values() for part in ms):
        widths = [breakdowns[title].get(part, 0.0) for title in titles]
        axes.barh(titles, widths, left=left, label=part.replace("_", " "))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms per decode step")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
