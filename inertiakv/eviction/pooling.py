"""Utilities pooled over neighbouring positions, so that spans are kept and not their heads alone.

Shape letters: N slots, after any others.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..cache.retention import EMPTY, NO_POSITION


class Pooling(NamedTuple):
    width: int
    by: Literal["max", "mean"]


def pooled(
    position_N: Tensor, utility_N: Tensor, protected_N: Tensor, width: int, by: Literal["max", "mean"]
) -> Tensor:
    """Each token's utility replaced by the largest, or the mean, of those held within `width // 2` positions
    of its own: what one query looks at is the head of a span whose rest is needed a few steps later.

    Protected tokens are left out, and come out as 0: they stay whatever they are worth, and a neighbour of
    the first token, which all look at, is worth no more for it (so SnapKV, arXiv 2404.14469, pools the tokens
    before its window alone)."""
    position_N = torch.where(protected_N, EMPTY, position_N)
    occupied_N = position_N > EMPTY
    order_N = torch.where(occupied_N, position_N, NO_POSITION).argsort(-1)
    sorted_N, utility_N = position_N.gather(-1, order_N), utility_N.gather(-1, order_N)
    best_N, total_N, number_N = utility_N, utility_N, torch.ones_like(utility_N)
    index_N = torch.arange(position_N.shape[-1], device=position_N.device)
    for distance in range(1, min(width // 2, len(index_N) - 1) + 1):
        # A neighbour by position is at most that far away in the order, since positions differ.
        for shift in (distance, -distance):
            at_N = (index_N + shift).clamp(0, len(index_N) - 1)
            position_there_N, other_N = sorted_N[..., at_N], utility_N[..., at_N]
            near_N = (sorted_N - position_there_N).abs() <= width // 2
            near_N = near_N & (position_there_N > EMPTY) & (at_N == index_N + shift)
            best_N = torch.where(near_N, torch.maximum(best_N, other_N), best_N)
            total_N = total_N + torch.where(near_N, other_N, 0.0)
            number_N = number_N + near_N
    pooled_N = best_N if by == "max" else total_N / number_N
    return torch.where(occupied_N, torch.empty_like(pooled_N).scatter(-1, order_N, pooled_N), 0.0)
