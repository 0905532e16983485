"""Where the time of a decode step goes, found by leaving parts out.

The decode step is compiled once whole and once without each part. What a step gets faster by without a part
is that part's time: so much can be gained there, and no more. What the parts do not add up to is the rest:
projections, norms, RoPE, cache writes. Scoring is a step that refreshes less one that does not, and the
host's share is what `Decoder.decode` takes longer than the bare compiled step.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from inertiakv.cache import SlotCache
from inertiakv.graphs import Graphs
from inertiakv.rows import Rows
from inertiakv.steps import decode_step
from inertiakv.view import CacheView
from models.layers import MLP
from models.moe import SparseMLP
from models.transformer import Transformer

from .machine import synchronize
from .ours import Ours

METHOD = (
    "each part left out of the compiled step in turn, the time that it saves; scoring: a step that refreshes "
    "less one that does not; rest: what remains of the step; host: decode() less the compiled step"
)
WARM_UP = 3


def _only_write(
    view: CacheView, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, **_: object
) -> Tensor:
    view.cache.layers[layer].write(view.slots_BT, k_BGTD, v_BGTD)
    return q_BHTD


def _only_look(rows: Rows, hidden_BE: Tensor, *, greedy: bool) -> None:
    rows.top_p_B.copy_(hidden_BE[:, 0])  # unused by greedy steps; or else the layers would be dead code


WITHOUT: dict[str, tuple[tuple[type, str, Callable[..., Any]], ...]] = {
    "attention": ((CacheView, "attend", _only_write),),
    "eviction": ((SlotCache, "evict_one", lambda cache, protected_BN, active_B: active_B),),
    "mlp": (
        (MLP, "forward", lambda mlp, x: x),
        (SparseMLP, "forward", lambda mlp, x: x),
    ),
    "head_and_sampling": (
        (Transformer, "head", lambda model, hidden: hidden),
        (Rows, "choose", _only_look),
    ),
}
"""For each part, what takes the place of the functions that make it up."""


def steps_needed(rounds: int, steps: int) -> int:
    """How many decode steps `break_down` runs."""
    return (len(WITHOUT) + 2) * (WARM_UP + rounds * steps)


@torch.no_grad()
def break_down(contender: Ours, rounds: int, steps: int, decode_ms: float) -> dict[str, Any]:
    """Milliseconds of the parts of a contender's average step, which `Decoder.decode` takes `decode_ms` for.
    The contender is under way, and spoilt by this for anything else."""
    variants: dict[str, tuple[bool, str | None]] = {"whole": (False, None)}
    if contender.eviction is not None:
        variants["refresh"] = (True, None)
    variants |= {part: (False, part) for part in WITHOUT}

    graphs = Graphs(contender.decoder.graphs.enabled, contender.device)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, (refresh, part) in variants.items():
            block = _block(contender, graphs, name, refresh, part, WARM_UP if turn == 0 else steps)
            if turn > 0:
                times[name].append(statistics.median(block))

    def more(dearer: str, cheaper: str) -> float:
        """By how much one variant takes longer than another, round by round."""
        pairs = zip(times[dearer], times[cheaper], strict=True)
        return max(0.0, statistics.median(a - b for a, b in pairs))

    whole = statistics.median(times["whole"])
    parts = {part: more("whole", part) for part in WITHOUT}
    parts["rest"] = max(0.0, whole - sum(parts.values()))
    parts["scoring"] = contender.refresh_share * (more("refresh", "whole") if "refresh" in times else 0.0)
    parts["host"] = max(0.0, decode_ms - whole - parts["scoring"])
    return {"method": METHOD, "ms": {part: round(value, 4) for part, value in parts.items()}}


def _block(
    contender: Ours, graphs: Graphs, name: str, refresh: bool, part: str | None, steps: int
) -> list[float]:
    """Milliseconds of steps of one variant, or their mean on a GPU."""
    decoder = contender.decoder
    assert decoder.cache is not None
    with contextlib.ExitStack() as stack:
        for owner, function, replacement in WITHOUT[part] if part else ():
            stack.enter_context(patch.object(owner, function, replacement))
        stamps = [_now(contender.device)]
        for index in range(steps):
            graphs.run(
                (name,),
                decode_step,
                decoder.model,
                decoder.cache,
                decoder.rows,
                decoder.method,
                decoder.aggregation,
                refresh=refresh,
                greedy=True,
            )
            if contender.device.type == "cpu" or index == steps - 1:
                stamps.append(_now(contender.device))
    if len(stamps) == 2:
        return [1000 * (stamps[1] - stamps[0]) / steps]
    return [1000 * (after - before) for before, after in pairwise(stamps)]


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def draw(contenders: Sequence[dict[str, Any]], file: Path) -> bool:
    """A bar for each contender of a results file that has a profile, as a picture; whether matplotlib is
    there to draw it."""
    try:
        import matplotlib
    except ImportError:
        return False
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
    return True
