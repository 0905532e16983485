"""Which tokens stay when a whole prompt is evicted to budget.

Shape letters: B batch, X retention sets, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.retention import RetentionSets
from ..cache.slot_cache import SlotCache
from ..config import EvictionConfig
from .allocation import SAFEGUARD, Ranked, joint
from .pooling import Pooling, pooled
from .protection import Limits, protected, rescued
from .rule import retained


def tokens_to_keep(
    cache: SlotCache, config: EvictionConfig, limits: Limits, newest_B: Tensor, pooling: Pooling | None
) -> list[Tensor]:
    """A bool mask [B, X, N] for each of the cache's retention sets. `newest_B`: the newest positions."""

    def ranked(sets: RetentionSets) -> Ranked:
        position_BXN, utility_BXN = sets.position_BXN, sets.utility_BXN
        protected_BXN = protected(position_BXN, newest_B, limits)
        if pooling is not None:
            utility_BXN = pooled(position_BXN, utility_BXN, protected_BXN, *pooling)
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
