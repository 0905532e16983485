"""A batch of conversations, whoever runs the model: what is cached of them, and where their turns stand.

`generation.py` runs the model itself; `inertiakv.integrations` is called by a model that runs by itself.

Shape letters: B batch, X retention sets, N slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.budgets import Budgets
from ..cache.slot_cache import SlotCache
from ..config import EvictionConfig
from .batch import BatchState
from .decoding_rule import DecodingRule


class Conversation:
    """Broken off in the middle of any change, it is between two states and of no use."""

    def __init__(self, rule: DecodingRule, cache: SlotCache, batch: BatchState) -> None:
        self.rule, self.cache, self.batch = rule, cache, batch
        self.turn_step = 0
        """Decode steps of this turn: the t of the refresh schedule."""

    @property
    def eviction(self) -> EvictionConfig | None:
        return self.rule.config

    def set_budgets(self, budgets: Budgets) -> None:
        for sets, of_rows in zip(self.cache.retention, budgets.by_layer, strict=False):
            sets.budget_BX.copy_(torch.tensor(of_rows)[:, None])

    def move_to(self, target: SlotCache, keep_BXN: Sequence[Tensor] | None = None) -> None:
        """Go on in `target`, which may be the cache there is, with all tokens or those marked."""
        keep_BXN = self.cache.everything() if keep_BXN is None else keep_BXN
        if target is self.cache:
            self.cache.keep(keep_BXN)
        else:
            target.take_from(self.cache, keep_BXN, release=self.releases(self.cache))
            self.cache = target

    def releases(self, cache: SlotCache) -> bool:
        """Whether the memory of a cache is given back when it is left."""
        return True
