"""The three passes over a cache: a chunk of prompt, the decode step, and the step that evicts a whole prompt.

Each drives a model by the small protocol that it needs: `model(tokens_BT, positions_BT, view) -> hidden_BTE`,
`model.head(hidden) -> logits` and the sizes in `model.config`.

Shape letters: B batch, T query tokens, E hidden size, V vocabulary, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .aggregation import Aggregation
from .attention import Backend
from .cache import SlotCache
from .config import EvictionConfig
from .eviction import EMPTY, protected, retained
from .protocol import LanguageModel
from .rows import Rows
from .view import CacheView


@dataclass(frozen=True)
class Method:
    """What the passes need to know beside the tensors."""

    eviction: EvictionConfig | None
    backend: Backend
    windows: tuple[int | None, ...]

    def protected(self, cache: SlotCache, newest_B: Tensor) -> Tensor:
        """Bool [B, N]: the tokens that this method never evicts."""
        if self.eviction is None:
            return torch.zeros_like(cache.position_BN, dtype=torch.bool)
        return protected(cache.position_BN, newest_B, self.eviction.sinks, self.eviction.recent)


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
    `CacheView`."""
    cache.insert(slots_BT, positions_BT)
    view = CacheView(
        cache,
        positions_BT,
        slots_BT,
        backend=method.backend,
        windows=method.windows,
        end_slot=end_slot,
        start_slot=start_slot,
    )
    return model(tokens_BT, positions_BT, view)


def decode_step(
    model: LanguageModel,
    cache: SlotCache,
    rows: Rows,
    method: Method,
    aggregation: Aggregation | None,
    *,
    refresh: bool,
    greedy: bool,
) -> None:
    """One decode step of every active row: feed its pending token, evict, choose the next. All state in
    place.

    This is the function that is compiled, one graph with and one without `refresh`.
    """
    active_B = ~rows.finished_B
    hidden_BE = _feed(model, cache, rows, method, aggregation, active_B, refresh=refresh)
    evicted_B = cache.evict_one(method.protected(cache, rows.position_B), active_B)
    rows.evictions_B.add_(evicted_B)
    rows.position_B.add_(active_B)
    rows.choose(model.head(hidden_BE), greedy=greedy)


def evicting_step(
    model: LanguageModel,
    cache: SlotCache,
    rows: Rows,
    method: Method,
    aggregation: Aggregation | None,
    end_slot: int,
) -> tuple[Tensor, Tensor]:
    """Feed one token a row, score, and choose what stays: the logits [B, V] and the tokens to keep, bool [B,
    N].

    The first decode step, on the whole prompt, and the last token of a further turn. A row that ended at its
    first token takes part where it holds more than its budget: what it keeps must be chosen by scores, too.
    """
    fed_B = ~rows.finished_B | (cache.count_B > cache.budget_B)
    # Dense whatever the backend: this step runs once, uncompiled, which FlexAttention is not made for.
    dense = replace(method, backend="dense")
    hidden_BE = _feed(model, cache, rows, dense, aggregation, fed_B, refresh=True, end_slot=end_slot)
    keep_BN = retained(
        cache.position_BN, cache.utility_BN, method.protected(cache, rows.position_B), cache.budget_B
    )
    rows.evictions_B.add_(cache.count_B - keep_BN.sum(-1))
    rows.position_B.add_(fed_B)
    rows.fed_B.logical_or_(fed_B)
    return model.head(hidden_BE), keep_BN


def _feed(
    model: LanguageModel,
    cache: SlotCache,
    rows: Rows,
    method: Method,
    aggregation: Aggregation | None,
    active_B: Tensor,
    *,
    refresh: bool,
    end_slot: int | None = None,
) -> Tensor:
    positions_B1 = rows.position_B[:, None]
    slots_B1 = cache.free_B[:, None]
    mean_B1 = None if refresh or aggregation is None else _mean_utility(cache)
    cache.insert(slots_B1, torch.where(active_B[:, None], positions_B1, EMPTY))
    if mean_B1 is not None:
        # A token that is not scored would start at the bottom, and go at once: it takes the mean (the
        # lazy refresh of the paper).
        cache.utility_BN.scatter_(1, slots_B1, torch.where(active_B[:, None], mean_B1, 0.0))
    view = CacheView(
        cache,
        positions_B1,
        slots_B1,
        backend=method.backend,
        windows=method.windows,
        aggregation=aggregation if refresh else None,
        active_B=active_B,
        end_slot=end_slot,
    )
    return model(rows.token_B[:, None], positions_B1, view)[:, 0]


def _mean_utility(cache: SlotCache) -> Tensor:
    # Summed in float64: tokens that take the mean in turn must come out equal, for ties to be ties.
    mean_B = cache.utility_BN.double().sum(-1) / cache.count_B.clamp_min(1)
    return mean_B.to(cache.utility_BN.dtype)[:, None]
