"""The one eviction rule: the lowest utility goes, and of equals the oldest; protected tokens stay.

It is written twice, since it is needed in two forms: one token a decode step, inside the graph, and any
number at once after a prompt. `compile_tests` holds the two to each other. Protection is a mask and never an
addition to the utility, which low precision would swallow. Nothing here depends on the order of slots.

Shape letters: B batch, X retention sets, N slots, S segments. The rule itself takes any sets: `_N` for [...,
N].
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

EMPTY = -1
"""Position of a slot that holds no token."""

NO_POSITION = torch.iinfo(torch.int32).max
"""Newer than every position."""


class Limits(NamedTuple):
    """What is never evicted from a row: positions at the start of the sequence, the newest, and some spaced
    evenly over its prompt. `spaced_B` None: none of these."""

    sinks_B: Tensor
    recent_B: Tensor
    prompt_B: Tensor
    spaced_B: Tensor | None

    @property
    def number_B(self) -> Tensor:
        """How many they are at most: among the newest there may be some of those spaced evenly."""
        number_B = self.sinks_B + self.recent_B
        return number_B if self.spaced_B is None else number_B + self.spaced_B


class Pooling(NamedTuple):
    width: int
    by: Literal["max", "mean"]


def protected(position_BXN: Tensor, newest_B: Tensor, limits: Limits) -> Tensor:
    """Bool mask of the tokens never evicted, where the newest position is `newest_B`."""
    newest_B11, sinks_B11, recent_B11 = (
        x_B[:, None, None] for x_B in (newest_B, limits.sinks_B, limits.recent_B)
    )
    protected_BXN = (position_BXN < sinks_B11) | (position_BXN > newest_B11 - recent_B11)
    if limits.spaced_B is not None:
        # One position in each of `spaced` equal parts of the prompt.
        prompt_B11, spaced_B11 = limits.prompt_B[:, None, None], limits.spaced_B[:, None, None]
        chosen_BXN = position_BXN.long() * spaced_B11 % prompt_B11 < spaced_B11
        protected_BXN = protected_BXN | (chosen_BXN & (position_BXN < prompt_B11))
    return protected_BXN


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


def rescued(position_BXN: Tensor, utility_BXN: Tensor, prompt_B: Tensor, segments: int) -> Tensor:
    """Bool mask of the best token in each of `segments` equal parts of the prompt, of equals the newest."""
    prompt_B11 = prompt_B[:, None, None]
    inside_BXN = (position_BXN > EMPTY) & (position_BXN < prompt_B11)
    segment_BXN = torch.where(inside_BXN, position_BXN.long() * segments // prompt_B11, segments)
    best_BXN = inside_BXN
    for key_BXN in (utility_BXN, position_BXN.to(utility_BXN.dtype)):
        key_BXN = torch.where(best_BXN, key_BXN, -torch.inf)
        top_BXS = key_BXN.new_full((*key_BXN.shape[:-1], segments + 1), -torch.inf)
        top_BXS = top_BXS.scatter_reduce(-1, segment_BXN, key_BXN, "amax")
        best_BXN = best_BXN & (key_BXN == top_BXS.gather(-1, segment_BXN))
    return best_BXN
