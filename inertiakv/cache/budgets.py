"""How many tokens each row may keep in each retention set, and how many of them are protected."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..config import MAX_BUDGET, EvictionConfig
from .retention import RetentionSets
from .slot_cache import bucket

PYRAMID_BETA = 20
"""The last layer of a pyramid gets this part of the mean (PyramidKV's beta)."""


class Budgets:
    """Budgets of rows with these prompt lengths under one rule; None keeps everything. Raises ValueError
    where a row's budget is smaller than what it protects.

    * `rows`: each row's budget, the mean over its sets;
    * `by_layer`: for each layer, each row's budget of its sets there;
    * `protection`: each row's protected positions, see `EvictionConfig.protection_for`;
    * `overfull`: whether the prompts have to be evicted.
    """

    def __init__(self, eviction: EvictionConfig | None, lengths: list[int], num_layers: int) -> None:
        self.lengths, self._grows = lengths, eviction is not None and eviction.after == "none"
        if eviction is None:
            self.rows, self.protection = [MAX_BUDGET] * len(lengths), [(0, 0, 0)] * len(lengths)
        else:
            self.rows = [eviction.budget_for(length) for length in lengths]
            self.protection = [
                eviction.protection_for(budget, length)
                for budget, length in zip(self.rows, lengths, strict=True)
            ]
        self.by_layer = [self.rows] * num_layers
        if eviction is not None and eviction.allocation == "pyramid":
            by_row = [
                pyramid(budget, sum(protected) + eviction.rescue, length, num_layers)
                if budget < length
                else [budget] * num_layers
                for budget, protected, length in zip(self.rows, self.protection, lengths, strict=True)
            ]
            self.by_layer = [list(budgets) for budgets in zip(*by_row, strict=True)]
        self.overfull = any(
            length > budget for sets in self.by_layer for length, budget in zip(lengths, sets, strict=True)
        )

    def decode_slots(self, new_tokens: int) -> int:
        """Slots of a decode cache for `new_tokens` more, where heads do not share their budgets."""
        beyond = new_tokens if self._grows else 0
        used = [
            min(budget + beyond, length + new_tokens)
            for sets in self.by_layer
            for length, budget in zip(self.lengths, sets, strict=True)
        ]
        return bucket(max(used) + 1)

    def enter(self, retention: Sequence[RetentionSets]) -> None:
        """Set them in a cache's retention sets."""
        for sets, of_rows in zip(retention, self.by_layer, strict=False):
            sets.budget_BX.copy_(torch.tensor(of_rows)[:, None])


def set_budgets_after_prompt(
    eviction: EvictionConfig, retention: Sequence[RetentionSets], keep_BXN: Sequence[Tensor]
) -> None:
    """Set the budgets for decoding, once it is known what stays of a prompt: heads that share a budget keep
    what they have, and `after="none"` has no limit."""
    if eviction.allocation in ("adaptive", "model"):
        spare_B = torch.stack([(sets.budget_BX - sets.count_BX).sum(-1) for sets in retention]).sum(0)
        for sets, kept_BXN in zip(retention, keep_BXN, strict=True):
            budget_BX = torch.where(spare_B[:, None] < 0, kept_BXN.sum(-1), sets.budget_BX)
            sets.budget_BX.copy_(budget_BX)
    if eviction.after == "none":
        for sets in retention:
            sets.budget_BX.fill_(MAX_BUDGET)


def pyramid(budget: int, protected: int, prompt: int, num_layers: int) -> list[int]:
    """A budget for each layer, falling in a straight line from twice the mean to a 20th of it, beside what is
    protected in each; where that is more than the prompt has, from the whole prompt to what is left then
    (PyramidKV, arXiv 2406.02069, and its authors' code). The whole numbers add up to `num_layers * budget`.
    """
    free = budget - protected
    most = min(2 * free - free / PYRAMID_BETA, prompt - protected)
    fall = (2 * most - 2 * free) / max(1, num_layers - 1)
    ends = [0.0]
    for layer in range(num_layers):
        ends.append(ends[-1] + (most - fall * layer if num_layers > 1 else free))
    bounds = [round(end) for end in ends]
    return [max(1, protected + hi - lo) for lo, hi in pairwise(bounds)]
