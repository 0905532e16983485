"""The three passes over a cache: a chunk of prompt, the decode step, and the step that evicts a whole prompt.

Each drives a model by the small protocol that it needs: `model(tokens_BT, positions_BT, view) -> hidden_BTE`,
`model.head(hidden) -> logits` and the sizes in `model.config`.

Shape letters: B batch, T query tokens, E hidden size, V vocabulary, X retention sets, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..attention.backend import Backend
from ..cache.retention import EMPTY, RetentionSets
from ..cache.slot_cache import SlotCache
from ..compiling.collectives import tensor_parallel_of
from ..config import EvictionConfig
from ..eviction.allocation import SAFEGUARD, Ranked, joint
from ..eviction.pooling import Pooling, pooled
from ..eviction.protection import Limits, protected, rescued
from ..eviction.rule import retained
from ..model import LanguageModel
from ..scoring.aggregation import Aggregation
from ..scoring.expected_attention import rotations
from .batch import BatchState
from .forward import CacheView, Pass
from .recording import Recorder


@dataclass(frozen=True)
class Method:
    """What the passes need to know beside the tensors."""

    eviction: EvictionConfig | None
    backend: Backend
    windows: tuple[int | None, ...]

    def limits(self, rows: BatchState) -> Limits:
        """What is protected in the rows."""
        spaced = self.eviction is not None and self.eviction.reserve > 0
        spaced_B = rows.spaced_B if spaced else None
        return Limits(rows.sinks_B, rows.recent_B, rows.prompt_B, spaced_B)

    @property
    def window_by(self) -> Literal["mean", "max"]:
        return "mean" if self.eviction is None else self.eviction.window_by

    @property
    def pooling(self) -> Pooling | None:
        if self.eviction is None or self.eviction.pool == 1:
            return None
        return Pooling(self.eviction.pool, self.eviction.pool_by)


def chunk_step(
    model: LanguageModel,
    cache: SlotCache,
    method: Method,
    tokens_BT: Tensor,
    positions_BT: Tensor,
    slots_BT: Tensor,
    end_slot: int | None,
    start_slot: int | None,
) -> Tensor:
    """Enter a chunk of prompt into the cache, hidden_BTE. Padding has position -1. For the last two, see
    `Pass`."""
    step = chunk_pass(method, positions_BT, slots_BT, end_slot, start_slot)
    return model(tokens_BT, positions_BT, CacheView(cache, step))


def chunk_pass(
    method: Method, positions_BT: Tensor, slots_BT: Tensor, end_slot: int | None, start_slot: int | None
) -> Pass:
    """What `chunk_step` does."""
    return Pass(
        positions_BT,
        slots_BT,
        method.backend,
        method.windows,
        end_slot=end_slot,
        start_slot=start_slot,
    )


def decode_step(
    model: LanguageModel,
    cache: SlotCache,
    rows: BatchState,
    method: Method,
    aggregation: Aggregation | None,
    recorder: Recorder | None,
    due: Tensor | None,
    *,
    greedy: bool,
) -> None:
    """One decode step of every active row: feed its pending token, evict, choose the next. All state in
    place.

    This is the function that is compiled. With an `aggregation` the step refreshes the utilities, or, given
    `due`, where that says so: bool [1], for one graph that serves steps with and without refresh.
    """
    active_B = ~rows.finished_B
    step = decode_pass(method, rows, active_B, scores=aggregation is not None, due=due)
    view = CacheView(
        cache, step, aggregation, due=due, record=recorder is not None, tp=tensor_parallel_of(model)
    )
    hidden_BE = model(rows.token_B[:, None], step.positions_BT, view)[:, 0]
    if recorder is not None:
        recorder.record(cache.retention[0], view.scores, torch.where(active_B, rows.position_B, EMPTY))
    view.finish()
    rows.position_B.add_(active_B)
    rows.choose(model.head(hidden_BE), greedy=greedy)


def decode_pass(
    method: Method, rows: BatchState, active_B: Tensor, *, scores: bool, due: Tensor | None = None
) -> Pass:
    """What `decode_step` does with its tokens."""
    eviction, mean_B = method.eviction, None
    if eviction is not None and eviction.goes_by_scores:
        # A token that is not scored would start at the bottom, and go at once: it takes the mean (the lazy
        # refresh of the paper).
        if not scores or eviction.new_token == "mean":
            mean_B = active_B
        elif due is not None:
            mean_B = active_B & ~due
    return Pass(
        rows.position_B[:, None],
        None,
        method.backend,
        method.windows,
        active_B=active_B,
        mean_B=mean_B,
        evict=method.limits(rows),
        by_age=eviction is not None and eviction.after == "recency",
        pool=method.pooling if eviction is not None and eviction.pool_at == "always" else None,
    )


def evicting_step(
    model: LanguageModel,
    cache: SlotCache,
    rows: BatchState,
    method: Method,
    aggregation: Aggregation | None,
    before_BW: Tensor,
    draft_BD: Tensor,
    recorder: Recorder | None,
    *,
    new: bool,
    end_slot: int,
) -> tuple[Tensor | None, list[Tensor]]:
    """Feed one token a row where `new`, score it together with the W tokens before it and a draft of the D
    after it, and choose what stays: the logits [B, V] of a new token, and for each table the tokens to keep,
    bool [B, X, N].

    The first decode step, on the whole prompt, and the last token of a further turn. A row that ended at its
    first token takes part where it holds more than its budget: what it keeps must be chosen by scores, too.
    `before_BW` are tokens that the cache holds, and `draft_BD` such as none of it is left of; -1 where a row
    has fewer.
    """
    fed_B = ~rows.finished_B | cache.overfull_B
    length, entered = before_BW.shape[1], int(new) + draft_BD.shape[1]
    tokens_BT = torch.cat((before_BW, rows.token_B[:, None][:, : int(new)], draft_BD), dim=1)
    slots_BT = None
    if draft_BD.shape[1]:  # behind the fullest set of each row: every set takes it at the same slots
        slots_BT = cache.most_B[:, None] + torch.arange(entered, device=cache.device)
    step = evicting_pass(
        method, rows, tokens_BT >= 0, fed_B, new=entered, end_slot=end_slot, slots_BT=slots_BT
    )
    positions_BT = step.positions_BT
    rotated = None
    if aggregation is not None and aggregation.scorer == "expected_attention":
        rotated = rotations(
            model, positions_BT, rows.position_B + int(new), cache.retention[0].utility_BXN.dtype
        )
    view = CacheView(
        cache,
        step,
        aggregation,
        rotations=rotated,
        by=method.window_by,
        record=recorder is not None,
        tp=tensor_parallel_of(model),
    )
    logits_BV = None
    if tokens_BT.shape[1]:
        hidden_BTE = model(tokens_BT.clamp_min(0), positions_BT, view)
        logits_BV = model.head(hidden_BTE[:, length]) if new else None
    if recorder is not None:
        recorder.record(cache.retention[0], view.scores, positions_BT[:, -1])
    if new:
        rows.position_B.add_(fed_B)
        rows.fed_B.logical_or_(fed_B)
    if draft_BD.shape[1]:
        cache.forget_from(rows.position_B)
    return logits_BV, chosen(cache, method, rows)


def evicting_pass(
    method: Method,
    rows: BatchState,
    real_BT: Tensor,
    fed_B: Tensor,
    *,
    new: int,
    end_slot: int,
    slots_BT: Tensor | None = None,
) -> Pass:
    """What `evicting_step` does with its queries, of which `real_BT` are no padding, in the rows `fed_B`; the
    last `new` of them enter the cache."""
    back_T = torch.arange(new - real_BT.shape[1], new, device=real_BT.device)
    return Pass(
        torch.where(real_BT & fed_B[:, None], rows.position_B[:, None] + back_T, EMPTY),
        slots_BT,
        # Dense whatever the backend: this step runs once, uncompiled, which FlexAttention is not made for.
        "dense",
        method.windows,
        active_B=fed_B,
        new=new,
        mean_B=fed_B if method.eviction is not None and method.eviction.new_token == "mean" else None,
        end_slot=end_slot,
    )


def chosen(cache: SlotCache, method: Method, rows: BatchState) -> list[Tensor]:
    """The tokens that stay when the prompt is evicted, for each table a bool mask [B, X, N]."""
    assert method.eviction is not None
    limits = method.limits(rows)
    sets = [_ranked(table, method, rows, limits) for table in cache.retention]
    if method.eviction.allocation == "adaptive":
        return [joint(of_layer, limits.number_B, SAFEGUARD) for of_layer in sets]
    if method.eviction.allocation == "model":
        together = Ranked._make(torch.cat(parts, dim=1) for parts in zip(*sets, strict=True))
        return list(joint(together, limits.number_B, None).chunk(len(sets), dim=1))
    return [retained(*of_table) for of_table in sets]


def _ranked(table: RetentionSets, method: Method, rows: BatchState, limits: Limits) -> Ranked:
    """The sets of a table, with what decides which of their tokens stay."""
    eviction = method.eviction
    assert eviction is not None
    position_BXN, utility_BXN = table.position_BXN, table.utility_BXN
    protected_BXN = protected(position_BXN, rows.position_B - 1, limits)
    ranked_BXN = utility_BXN
    if method.pooling is not None:
        ranked_BXN = pooled(position_BXN, utility_BXN, protected_BXN, *method.pooling)
    if eviction.rescue:
        protected_BXN = protected_BXN | rescued(position_BXN, utility_BXN, rows.prompt_B, eviction.rescue)
    return Ranked(position_BXN, ranked_BXN, protected_BXN, table.budget_BX)
