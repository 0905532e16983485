"""Utilities pooled over neighbouring positions, to keep whole spans.

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


def pooled(position_N: Tensor, utility_N: Tensor, protected_N: Tensor, pooling: Pooling) -> Tensor:
    """Replace each token's utility by the maximum or mean over cached tokens within `width // 2` positions.
    A query looks at the head of a span; the rest of it is needed a few steps later.

    Protected tokens are left out and get 0: they stay anyway, and neighbours of the first token, which
    every query looks at, should not profit from it. (SnapKV, arXiv 2404.14469, likewise pools only the
    tokens before its window.)"""
    width, by = pooling
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
