"""How many tokens each row of a conversation may keep, in each retention set, and what is protected among
them."""

from __future__ import annotations

from collections.abc import Sequence

from .allocation import pyramid
from .cache import bucket
from .config import MAX_BUDGET, EvictionConfig


class Budgets:
    """Of rows with these prompt lengths under one rule; None keeps everything. Raises ValueError where a
    row's budget cannot be.

    * `rows`: each row's budget, the mean over its sets;
    * `tables`: for each layer, each row's budget of its sets there;
    * `protection`: each row's protected positions, see `EvictionConfig.protection_for`;
    * `overfull`: whether the prompts have to be evicted.
    """

    def __init__(self, eviction: EvictionConfig | None, lengths: Sequence[int], num_layers: int) -> None:
        self._lengths, self._grows = lengths, eviction is not None and eviction.after == "none"
        if eviction is None:
            self.rows, self.protection = [MAX_BUDGET] * len(lengths), [(0, 0, 0)] * len(lengths)
        else:
            self.rows = [eviction.budget_for(length) for length in lengths]
            self.protection = [
                eviction.protection_for(budget, length)
                for budget, length in zip(self.rows, lengths, strict=True)
            ]
        self.tables = [self.rows] * num_layers
        if eviction is not None and eviction.allocation == "pyramid":
            by_row = [
                pyramid(budget, sum(protected) + eviction.rescue, length, num_layers)
                if budget < length
                else [budget] * num_layers
                for budget, protected, length in zip(self.rows, self.protection, lengths, strict=True)
            ]
            self.tables = [list(budgets) for budgets in zip(*by_row, strict=True)]
        self.overfull = any(
            length > budget for table in self.tables for length, budget in zip(lengths, table, strict=True)
        )

    def decode_slots(self, new_tokens: int) -> int:
        """Slots of a decode cache to which `new_tokens` are fed, where heads do not share their budgets."""
        return bucket(
            max(
                min(budget, length) + new_tokens + 1
                if self._grows
                else min(budget + 1, length + new_tokens + 1)
                for table in self.tables
                for length, budget in zip(self._lengths, table, strict=True)
            )
        )
