"""The one eviction rule: the lowest utility goes, and of equals the oldest; protected tokens stay.

It is written twice, since it is needed in two forms: one token a decode step, inside the graph, and any
number at once after a prompt. `compile_tests` holds the two to each other. Protection is a mask and never an
addition to the utility, which low precision would swallow. Nothing here depends on the order of slots.

Shape letters: B batch, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY = -1
"""Position of a slot that holds no token."""

_NO_POSITION = torch.iinfo(torch.int32).max


def protected(position_BN: Tensor, newest_B: Tensor, sinks: int, recent: int) -> Tensor:
    """Bool mask of the tokens never evicted: positions below `sinks`, and the `recent` newest up to
    `newest_B`."""
    return (position_BN < sinks) | (position_BN > newest_B[:, None] - recent)


def next_slot(position_BN: Tensor, utility_BN: Tensor, protected_BN: Tensor, budget_B: Tensor) -> Tensor:
    """The slot that the next token takes, slot_B: an empty one while the row keeps no more than its budget,
    else that of the token to evict. Needs N > budget. Runs inside the graph."""
    occupied_BN = position_BN > EMPTY
    room_B1 = (occupied_BN.sum(-1) <= budget_B)[:, None]
    candidate_BN = torch.where(room_B1, ~occupied_BN, occupied_BN & ~protected_BN)
    cost_BN = torch.where(candidate_BN & occupied_BN, utility_BN, torch.inf)
    lowest_BN = candidate_BN & (cost_BN == cost_BN.amin(-1, keepdim=True))
    return torch.where(lowest_BN, position_BN, _NO_POSITION).argmin(-1)


def retained(position_BN: Tensor, utility_BN: Tensor, protected_BN: Tensor, budget_B: Tensor) -> Tensor:
    """Bool mask of the tokens that stay when each row is evicted down to its budget."""
    order_BN = position_BN.argsort(dim=-1, descending=True, stable=True)
    for key_BN in (utility_BN, protected_BN.to(torch.int8), (position_BN > EMPTY).to(torch.int8)):
        by_key_BN = key_BN.gather(-1, order_BN).argsort(dim=-1, descending=True, stable=True)
        order_BN = order_BN.gather(-1, by_key_BN)
    first_BN = torch.arange(position_BN.shape[-1], device=position_BN.device) < budget_B[:, None]
    keep_BN = torch.zeros_like(first_BN).scatter(-1, order_BN, first_BN)
    return keep_BN & (position_BN > EMPTY)
