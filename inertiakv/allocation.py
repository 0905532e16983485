"""How a row's budget is spread over its retention sets. On average a set has the row's budget.

Shape letters: B batch, X retention sets of a layer, N slots.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .eviction import Limits, retained

PYRAMID_BETA = 20
"""The last layer of a pyramid gets this part of the mean (PyramidKV's beta)."""
SAFEGUARD = 5
"""Each head keeps this part of the budget whatever the other heads' utilities are (AdaKV's alpha is a
fifth)."""


def pyramid(budget: int, protected: int, num_layers: int) -> list[int]:
    """A budget for each layer, falling in a straight line from twice the mean to a 20th of it, beside what is
    protected in each (PyramidKV, arXiv 2406.02069). The whole numbers add up to `num_layers * budget`."""
    free = budget - protected
    least = free / PYRAMID_BETA
    most = 2 * free - least
    fall = (most - least) / max(1, num_layers - 1)
    ends = [0.0]
    for layer in range(num_layers):
        ends.append(ends[-1] + (most - fall * layer if num_layers > 1 else free))
    bounds = [round(end) for end in ends]
    return [max(1, protected + hi - lo) for lo, hi in pairwise(bounds)]


def adaptive(
    position_BXN: Tensor, utility_BXN: Tensor, protected_BXN: Tensor, budget_BX: Tensor, limits: Limits
) -> Tensor:
    """Bool mask of the tokens of a layer that stay when its heads share one budget, and so how many tokens
    each head keeps: the best of all heads together, after the protected ones and each head's own best, the
    safeguard (AdaKV, arXiv 2407.11550)."""
    total_B = budget_BX.sum(-1)
    # No less than is protected, now or later: among the newest there may be some of those spaced evenly.
    least_B = limits.sinks_B + limits.recent_B + (0 if limits.spaced_B is None else limits.spaced_B)
    own_B = torch.maximum(total_B // budget_BX.shape[1] // SAFEGUARD, least_B).clamp_min(1)
    safe_BXN = retained(position_BXN, utility_BXN, protected_BXN, own_B[:, None].expand_as(budget_BX))
    all_BN, safe_BN = position_BXN.flatten(1), (safe_BXN | protected_BXN).flatten(1)
    keep_BN = retained(all_BN, utility_BXN.flatten(1), safe_BN, total_B)
    return keep_BN.unflatten(1, position_BXN.shape[1:])
