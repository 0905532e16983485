"""The one eviction rule: the lowest utility goes, and of equals the oldest; protected tokens stay.

It exists in two forms: one token per decode step, inside the graph, and many at once after a prompt. Tests
check that they agree. Nothing here depends on the order of slots.

Shape letters: N slots, after any others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.retention import EMPTY, NO_POSITION, RetentionSets


def next_slot(position_N: Tensor, utility_N: Tensor, protected_N: Tensor, budget: Tensor) -> Tensor:
    """The slot that a set's next token takes: an empty one while the set keeps no more than its budget, else
    that of the token to evict. Needs N > budget. Runs inside the graph."""
    occupied_N = position_N > EMPTY
    room_1 = (occupied_N.sum(-1) <= budget)[..., None]
    candidate_N = torch.where(room_1, ~occupied_N, occupied_N & ~protected_N)
    cost_N = torch.where(candidate_N & occupied_N, utility_N, torch.inf)
    lowest_N = candidate_N & (cost_N == cost_N.amin(-1, keepdim=True))
    return torch.where(lowest_N, position_N, NO_POSITION).argmin(-1)


def retained(position_N: Tensor, utility_N: Tensor, protected_N: Tensor, budget: Tensor) -> Tensor:
    """Bool mask of the tokens that stay when each set is evicted down to its budget."""
    order_N = position_N.argsort(dim=-1, descending=True, stable=True)
    for key_N in (utility_N, protected_N.to(torch.int8), (position_N > EMPTY).to(torch.int8)):
        by_key_N = key_N.gather(-1, order_N).argsort(dim=-1, descending=True, stable=True)
        order_N = order_N.gather(-1, by_key_N)
    first_N = torch.arange(position_N.shape[-1], device=position_N.device) < budget[..., None]
    keep_N = torch.zeros_like(first_N).scatter(-1, order_N, first_N)
    return keep_N & (position_N > EMPTY)


def evict_one(sets: RetentionSets, utility_BXN: Tensor, protected_BXN: Tensor, active_B: Tensor) -> None:
    """Choose by these utilities the slot of the next token in the active rows, and empty it, in place. Runs
    inside the graph. Other rows stay as they are."""
    free_BX = next_slot(sets.position_BXN, utility_BXN, protected_BXN, sets.budget_BX)
    free_BX = torch.where(active_B[:, None], free_BX, sets.free_BX)
    sets.free_BX.copy_(free_BX)
    sets.position_BXN.scatter_(-1, free_BX[..., None], EMPTY)
    sets.utility_BXN.scatter_(-1, free_BX[..., None], 0.0)
