"""The mask rule, for single slots and for whole blocks of them. `flex.py` says it again as a `mask_mod`, and
`dense.py` reads prompts without a mask where causality says the same.

Slot n is seen by a query at position p iff 0 <= position[n] <= p, and p - position[n] < window where the
layer has a sliding window. A query at position -1, which is padding, sees nothing. With this rule
prefill, batches of different lengths, decoding and a further turn are one operation with another T.

Shape letters: B batch, X retention sets (1, or one for each KV head), T query tokens, N slots, Q and K blocks
of queries and of slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache.slot_cache import MASK_BLOCK

BlockLists = tuple[Tensor, Tensor, Tensor, Tensor]
"""FlexAttention's block mask: number and indices of partial blocks, then of full blocks, for each block of
queries, int32 [B, 1, Q] and [B, 1, Q, K]."""


def visible(position_BXN: Tensor, query_BT: Tensor, window: int | None) -> Tensor:
    """The mask rule, bool [B, X, T, N]."""
    key_BX1N, query_B1T1 = position_BXN[:, :, None], query_BT[:, None, :, None]
    seen_BXTN = (key_BX1N >= 0) & (key_BX1N <= query_B1T1)
    return seen_BXTN if window is None else seen_BXTN & (query_B1T1 - key_BX1N < window)


def block_lists(position_BXN: Tensor, query_BT: Tensor, window: int | None) -> BlockLists:
    """The mask rule for whole blocks, from the smallest and largest position of each: O(N + T) memory,
    inside the graph. One mask serves all sets: a block is full if it is full in every set, partial if it is
    visible in any."""
    lo_key_BX1K, hi_key_BX1K = (key_BXK[:, :, None] for key_BXK in _block_range(position_BXN))
    lo_query_B1Q1, hi_query_B1Q1 = (query_BQ[:, None, :, None] for query_BQ in _block_range(query_BT))
    some_BXQK = (lo_key_BX1K <= hi_query_B1Q1) & (hi_key_BX1K >= 0)
    # A block without holes, all of it at or before every one of its queries, needs no look at single slots.
    whole_BXQK = (
        (hi_key_BX1K <= lo_query_B1Q1)
        & _block_full(position_BXN)[:, :, None]
        & _block_full(query_BT)[:, None, :, None]
    )
    if window is not None:
        some_BXQK = some_BXQK & (lo_query_B1Q1 - hi_key_BX1K < window)
        whole_BXQK = whole_BXQK & (hi_query_B1Q1 - lo_key_BX1K < window)

    some_BQK, whole_BQK = some_BXQK.any(1), (some_BXQK & whole_BXQK).all(1)
    return *_block_list(some_BQK & ~whole_BQK), *_block_list(whole_BQK)


def _blocks(position_P: Tensor) -> Tensor:
    """Positions [..., P] cut into mask blocks, [..., blocks, positions of a block], the last one filled up
    with -1. Fewer than a block of them are one, as they are."""
    size = min(MASK_BLOCK, position_P.shape[-1])
    return F.pad(position_P, (0, -position_P.shape[-1] % size), value=-1).unflatten(-1, (-1, size))


def _block_range(position_P: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest position in each block; -1 is no position, and a block without any gets (big,
    -1)."""
    blocks = _blocks(position_P)
    return torch.where(blocks < 0, torch.iinfo(blocks.dtype).max, blocks).amin(-1), blocks.amax(-1)


def _block_full(position_P: Tensor) -> Tensor:
    return (_blocks(position_P) >= 0).all(-1)


def _block_list(chosen_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention's form of a set of blocks: how many, and their indices first."""
    chosen_B1QK = chosen_BQK[:, None].to(torch.int32)
    order = chosen_B1QK.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return chosen_B1QK.sum(-1, dtype=torch.int32), order
