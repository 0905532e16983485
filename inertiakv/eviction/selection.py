"""Which tokens stay when a whole prompt is evicted to budget, and how a row's budget is spread over its
retention sets. On average a set has the row's budget.

Shape letters: B batch, X retention sets, N slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.retention import RetentionSets
from ..cache.slot_cache import SlotCache
from ..config import EvictionConfig
from .pooling import Pooling, pooled
from .protection import Limits, protected, rescued
from .rule import retained

SAFEGUARD = 5
"""This part of the budget is spread evenly over the heads of a layer (AdaKV's safeguard, 0.2)."""


class Ranked(NamedTuple):
    """Retention sets to be evicted to budget, with what decides which tokens stay."""

    position_BXN: Tensor
    utility_BXN: Tensor
    protected_BXN: Tensor
    budget_BX: Tensor


def joint(sets: Ranked, least_B: Tensor, even: int | None) -> Tensor:
    """Bool mask of the tokens that stay when the sets share their budgets. Protected tokens stay first;
    then each set keeps as many as it has among the best of all sets together, at least `least_B`. With
    `even`, one part in `even` of the budget is spread evenly instead.

    AdaKV (arXiv 2407.11550) does so with the heads of a layer, and spreads a fifth evenly, its safeguard.
    KVzip (arXiv 2505.23416) does so with all heads of all layers, without one.
    """
    position_BXN, utility_BXN, protected_BXN, budget_BX = sets
    number, total_B = budget_BX.shape[1], budget_BX.sum(-1)
    safe_BXN = retained(position_BXN, utility_BXN, protected_BXN, least_B[:, None].expand_as(budget_BX))
    all_BN, safe_BN = position_BXN.flatten(1), (safe_BXN | protected_BXN).flatten(1)
    best_BN = retained(all_BN, utility_BXN.flatten(1), safe_BN, total_B)
    own_BX = best_BN.unflatten(1, position_BXN.shape[1:]).sum(-1)
    if even is not None:
        # In whole numbers of a unit, and back by differences of rounded sums: these add up to the same total.
        unit = even * number
        ends_BX = ((even - 1) * number * own_BX + total_B[:, None]).cumsum(-1)
        ends_BX = (2 * ends_BX + unit) // (2 * unit)
        own_BX = ends_BX.diff(dim=-1, prepend=torch.zeros_like(ends_BX[:, :1]))
    return retained(position_BXN, utility_BXN, protected_BXN, own_BX)


def tokens_to_keep(
    cache: SlotCache, config: EvictionConfig, limits: Limits, newest_B: Tensor, pooling: Pooling | None
) -> list[Tensor]:
    """A bool mask [B, X, N] for each of the cache's retention sets. `newest_B`: the newest positions."""

    def ranked(sets: RetentionSets) -> Ranked:
        position_BXN, utility_BXN = sets.position_BXN, sets.utility_BXN
        protected_BXN = protected(position_BXN, newest_B, limits)
        if pooling is not None:
            utility_BXN = pooled(position_BXN, utility_BXN, protected_BXN, pooling)
        if config.rescue:
            best_BXN = rescued(position_BXN, sets.utility_BXN, limits.prompt_B, config.rescue)
            protected_BXN = protected_BXN | best_BXN
        return Ranked(position_BXN, utility_BXN, protected_BXN, sets.budget_BX)

    sets = [ranked(of_layer) for of_layer in cache.retention]
    if config.allocation == "adaptive":
        return [joint(of_layer, limits.number_B, SAFEGUARD) for of_layer in sets]
    if config.allocation == "model":
        together = Ranked._make(torch.cat(parts, dim=1) for parts in zip(*sets, strict=True))
        return list(joint(together, limits.number_B, None).chunk(len(sets), dim=1))
    return [retained(*of_layer) for of_layer in sets]
