"""How a row's budget is spread over its retention sets. On average a set has the row's budget.

Shape letters: B batch, X retention sets, N slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
