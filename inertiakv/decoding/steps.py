"""The forward passes: a prompt chunk, the step that evicts a whole prompt, the decode step.

Each `*_step` runs a model (`inertiakv.model`). `decode_state` and `evicting_state` are for models that run by
themselves, too (`inertiakv.integrations`).

Shape letters: B batch, T query tokens, E hidden size, V vocabulary, W tokens before the new one, D drafted
tokens, X retention sets, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.forward_state import ForwardState
from ..cache.retention import EMPTY
from ..cache.slot_cache import SlotCache
from ..eviction.selection import tokens_to_keep
from ..model import LanguageModel
from ..scoring.expected_attention import rotations
from .batch import BatchState
from .decoding_rule import DecodingRule
from .forward import ForwardPass
from .recording import Recorder


def chunk_step(
    model: LanguageModel,
    cache: SlotCache,
    rule: DecodingRule,
    tokens_BT: Tensor,
    positions_BT: Tensor,
    slots_BT: Tensor,
    slots_used: int | None,
    slots_before: int | None,
) -> Tensor:
    """Enter a chunk of a prompt into the cache, hidden_BTE. Padding has position -1. For the last two, see
    `ForwardState`."""
    state = ForwardState(positions_BT, slots_BT, rule.backend, rule.windows, slots_used, slots_before)
    return model(tokens_BT, positions_BT, ForwardPass(cache, state))


def decode_step(
    model: LanguageModel,
    cache: SlotCache,
    batch: BatchState,
    rule: DecodingRule,
    recorder: Recorder | None,
    *,
    scores: bool,
    greedy: bool,
) -> None:
    """One decode step of every active row: feed its pending token, evict, choose the next. All state changes
    in place. This is the function that is compiled.

    `scores`: refresh the utilities, or, with `rule.refresh_due`, only where that says so.
    """
    active_B = ~batch.finished_B
    state = decode_state(rule, batch, active_B, scores=scores, record=recorder is not None)
    forward = ForwardPass(cache, state, rule.coefficients())
    hidden_BE = model(batch.token_B[:, None], state.query_BT, forward)[:, 0]
    if recorder is not None:
        newest_B = torch.where(active_B, batch.position_B, EMPTY)
        recorder.record(cache.retention[0], forward.layer_scores, newest_B)
    forward.finish()
    batch.position_B.add_(active_B)
    batch.choose(model.head(hidden_BE), greedy=greedy)


def decode_state(
    rule: DecodingRule, batch: BatchState, active_B: Tensor, *, scores: bool, record: bool = False
) -> ForwardState:
    """Of `decode_step`."""
    config, due, mean_B = rule.config, rule.refresh_due if scores else None, None
    if config is not None and config.goes_by_scores:
        # A token that is not scored would start at the bottom, and go at once: it takes the mean (the lazy
        # refresh of the paper).
        if not scores or config.new_token == "mean":
            mean_B = active_B
        elif due is not None:
            mean_B = active_B & ~due
    state = ForwardState(
        batch.position_B[:, None],
        None,
        rule.backend,
        rule.windows,
        active_B=active_B,
        mean_B=mean_B,
        limits=rule.limits(batch),
        by_age=config is not None and config.after == "recency",
        pooling=rule.pooling if config is not None and config.pool_at == "always" else None,
    )
    if scores:
        scored_B = active_B if due is None else active_B & due
        state = state._replace(**rule.scoring_fields(scored_B, record=record))
    return state


def evicting_step(
    model: LanguageModel,
    cache: SlotCache,
    batch: BatchState,
    rule: DecodingRule,
    recorder: Recorder | None,
    before_BW: Tensor,
    draft_BD: Tensor,
    *,
    new: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """Feed one token a row where `new`, score it together with the W tokens before it and a draft of the D
    after it, and choose what stays: the logits [B, V] of a new token, and for each of the cache's retention
    sets the tokens to keep, bool [B, X, N].

    The first decode step, on the whole prompt, and the last token of a further turn. A row that ended at its
    first token takes part where it holds more than its budget: what it keeps must be chosen by scores, too.
    `before_BW` are tokens that the cache holds, and of `draft_BD` none is left in it; -1 where a row has
    fewer.
    """
    length, entered = before_BW.shape[1], int(new) + draft_BD.shape[1]
    tokens_BT = torch.cat((before_BW, batch.token_B[:, None][:, : int(new)], draft_BD), dim=1)
    state = evicting_state(cache, rule, batch, tokens_BT >= 0, new=entered)
    positions_BT, fed_B, logits_BV = state.query_BT, state.active_B, None
    if draft_BD.shape[1]:  # behind the fullest set of each row: every set takes it at the same slots
        slots_BT = cache.most_B[:, None] + torch.arange(entered, device=cache.device)
        state = state._replace(slots_BT=slots_BT)
    if state.scorer == "expected_attention":
        next_B = batch.position_B + int(new)
        dtype = cache.retention[0].utility_BXN.dtype
        state = state._replace(rotations=rotations(model, positions_BT, next_B, dtype))
    if tokens_BT.shape[1]:
        state = state._replace(record=recorder is not None)
        forward = ForwardPass(cache, state, rule.coefficients())
        hidden_BTE = model(tokens_BT.clamp_min(0), positions_BT, forward)
        logits_BV = model.head(hidden_BTE[:, length]) if new else None
        if recorder is not None:
            recorder.record(cache.retention[0], forward.layer_scores, positions_BT[:, -1])
    if new:
        assert fed_B is not None
        batch.position_B.add_(fed_B)
        batch.fed_B.logical_or_(fed_B)
    if draft_BD.shape[1]:
        cache.forget_from(batch.position_B)
    return logits_BV, chosen(cache, rule, batch)


def evicting_state(
    cache: SlotCache, rule: DecodingRule, batch: BatchState, real_BT: Tensor, *, new: int
) -> ForwardState:
    """Of `evicting_step`, with queries of which `real_BT` are no padding; the last `new` of them enter the
    cache."""
    fed_B = ~batch.finished_B | cache.overfull_B
    assert rule.config is not None
    back_T = torch.arange(new - real_BT.shape[1], new, device=real_BT.device)
    state = ForwardState(
        torch.where(real_BT & fed_B[:, None], batch.position_B[:, None] + back_T, EMPTY),
        None,
        # Dense whatever the backend: this step runs once, uncompiled, which FlexAttention is not made for.
        "dense",
        rule.windows,
        active_B=fed_B,
        new=new,
        mean_B=fed_B if rule.config.new_token == "mean" else None,
        slots_used=cache.filled + new,
    )
    if rule.scores:
        state = state._replace(**rule.scoring_fields(fed_B, window_by=rule.config.window_by))
    return state


def chosen(cache: SlotCache, rule: DecodingRule, batch: BatchState) -> list[Tensor]:
    """The tokens that stay when the prompt is evicted, a bool mask [B, X, N] for each of the cache's
    retention sets."""
    assert rule.config is not None
    return tokens_to_keep(cache, rule.config, rule.limits(batch), batch.position_B - 1, rule.pooling)
