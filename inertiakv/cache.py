"""The slot cache: static K and V buffers, and the table that says which position each slot holds.

Slots are physical, positions are logical. A token keeps the position it has in the uncompressed sequence,
whatever is evicted around it, and its slot says nothing about its age.

Shape letters: B batch, T query tokens, L layers, G KV heads, N slots, D head dim, K slots kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .eviction import EMPTY, next_slot

MASK_BLOCK = 128
"""Slots come in multiples of this: FlexAttention's block of a mask."""


def bucket(tokens: int) -> int:
    """Slots to allocate for `tokens`: the next multiple of an eighth of its power of two, at least a mask
    block.

    Nearby lengths share a buffer shape, and so a compiled graph, for at most an eighth more memory, or a
    block more where there are fewer than 1,024.
    """
    step = max(MASK_BLOCK, (1 << (tokens.bit_length() - 1)) // 8)
    return -(-tokens // step) * step


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache. KV heads are stored once, never expanded to query heads."""

    layers: int
    batch: int
    kv_heads: int
    slots: int
    head_dim: int

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of K and V in all layers."""
        return 2 * self.layers * self.batch * self.kv_heads * self.slots * self.head_dim * dtype.itemsize


class LayerCache(nn.Module):
    """K (after RoPE) and V of one layer, [B, G, N, D] each. Made without memory: `allocate` gives it."""

    k_BGND: Tensor
    v_BGND: Tensor

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._size = (shape.batch, shape.kv_heads, shape.slots, shape.head_dim)
        self.register_buffer("k_BGND", torch.empty(0, dtype=dtype, device=device))
        self.register_buffer("v_BGND", torch.empty(0, dtype=dtype, device=device))

    def allocate(self) -> None:
        """Give K and V their memory, if they have none. Zeros, since the weight 0 of an unseen slot times an
        uninitialised NaN would be NaN."""
        if self.k_BGND.numel() == 0:
            self.k_BGND = self.k_BGND.new_zeros(self._size)
            self.v_BGND = self.v_BGND.new_zeros(self._size)

    def release(self) -> None:
        """Give the memory of K and V back."""
        self.k_BGND = self.k_BGND.new_empty(0)
        self.v_BGND = self.v_BGND.new_empty(0)

    def write(self, slots_BT: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Put new tokens' K and V into their slots, in place."""
        row_B1 = torch.arange(slots_BT.shape[0], device=slots_BT.device)[:, None]
        self.k_BGND[row_B1, :, slots_BT] = k_BGTD.transpose(1, 2)
        self.v_BGND[row_B1, :, slots_BT] = v_BGTD.transpose(1, 2)

    def fill_from(self, source: LayerCache, slots_BK: Tensor, counts: list[int]) -> None:
        """Copy the first `counts[b]` of `source`'s slots `slots_BK` into row b's first slots and zero the
        others. Row by row, so that the only memory it takes beyond its own is one row's kept tokens."""
        for mine_BGND, theirs_BGND in ((self.k_BGND, source.k_BGND), (self.v_BGND, source.v_BGND)):
            for row, kept in enumerate(counts):
                mine_BGND[row, :, :kept] = theirs_BGND[row].index_select(1, slots_BK[row, :kept])
                mine_BGND[row, :, kept:] = 0


class SlotCache(nn.Module):
    """K and V of all layers, and one table for all of them (the paper's shared retention set).

    A module with buffers, so that a compiled graph takes them at fixed addresses and writes them in place.

    * `position_BN` int32: the logical position in each slot, `EMPTY` where there is none;
    * `utility_BN`: each token's utility m, float32 (float64 for a float64 model), 0 where empty;
    * `free_B` int64: the slot that the row's next token takes;
    * `budget_B` int64: tokens that the row keeps.
    """

    layers: Sequence[LayerCache]
    position_BN: Tensor
    utility_BN: Tensor
    free_B: Tensor
    budget_B: Tensor

    def __init__(
        self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device | str, allocate: bool = True
    ) -> None:
        super().__init__()
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        table = (shape.batch, shape.slots)
        score_dtype = torch.promote_types(dtype, torch.float32)
        layers = nn.ModuleList(LayerCache(shape, dtype, self.device) for _ in range(shape.layers))
        self.layers = layers  # type: ignore[assignment]
        self.register_buffer("position_BN", torch.full(table, EMPTY, dtype=torch.int32, device=device))
        self.register_buffer("utility_BN", torch.zeros(table, dtype=score_dtype, device=device))
        self.register_buffer("free_B", torch.zeros(shape.batch, dtype=torch.int64, device=device))
        self.register_buffer("budget_B", torch.full((shape.batch,), shape.slots, device=device))
        if allocate:
            self.allocate()

    def allocate(self) -> None:
        """Give every layer its memory, where it has none."""
        for layer in self.layers:
            layer.allocate()

    @property
    def allocated_bytes(self) -> int:
        """Bytes that K and V hold now, as allocated."""
        return sum(
            t.untyped_storage().nbytes() for layer in self.layers for t in (layer.k_BGND, layer.v_BGND)
        )

    @property
    def count_B(self) -> Tensor:
        """Tokens that each row holds, int64."""
        return (self.position_BN > EMPTY).sum(-1)

    def clear(self) -> None:
        """Forget everything. V is zeroed as well: a NaN left by a former request would outlive its token,
        since the weight 0 of an unseen slot times NaN is NaN."""
        self.position_BN.fill_(EMPTY)
        self.utility_BN.zero_()
        self.free_B.zero_()
        for layer in self.layers:
            layer.v_BGND.zero_()

    def insert(self, slots_BT: Tensor, positions_BT: Tensor) -> None:
        """Enter new tokens, of utility 0, into the table. A token at position `EMPTY` is padding and enters
        nothing."""
        self.position_BN.scatter_(1, slots_BT, positions_BT.to(torch.int32))
        self.utility_BN.scatter_(1, slots_BT, 0.0)

    def evict_one(self, protected_BN: Tensor, active_B: Tensor) -> Tensor:
        """Choose the next token's slot in the active rows and empty it; bool_B: whether that evicted a token.

        Runs inside the graph. Other rows stay as they are.
        """
        free_B = next_slot(self.position_BN, self.utility_BN, protected_BN, self.budget_B)
        free_B = torch.where(active_B, free_B, self.free_B)
        free_B1 = free_B[:, None]
        evicts_B = active_B & (self.position_BN.gather(1, free_B1)[:, 0] > EMPTY)
        self.free_B.copy_(free_B)
        self.position_BN.scatter_(1, free_B1, EMPTY)
        self.utility_BN.scatter_(1, free_B1, 0.0)
        return evicts_B

    def keep(self, keep_BN: Tensor) -> None:
        """Evict all tokens but those that `keep_BN` marks, in place. Every row must have an empty slot
        then."""
        self.position_BN.masked_fill_(~keep_BN, EMPTY)
        self.utility_BN.masked_fill_(~keep_BN, 0.0)
        self.free_B.copy_((~keep_BN).int().argmax(-1))

    def take_from(self, source: SlotCache, keep_BN: Tensor, *, release: bool) -> None:
        """Become a copy of the tokens that `keep_BN` marks in `source`, oldest first, with their utilities.

        Layer by layer, allocating here what has no memory yet and giving back the source's with `release`:
        then no more than one layer of this cache is ever held beside the source.
        """
        count_B = keep_BN.sum(-1)
        counts = count_B.tolist()
        kept = max(counts)
        assert kept < self.shape.slots, f"{kept} tokens and the next one in {self.shape.slots} slots"
        age_BN = torch.where(keep_BN, source.position_BN, torch.iinfo(torch.int32).max)
        slots_BK = age_BN.argsort(-1)[:, :kept]
        real_BK = torch.arange(kept, device=self.device) < count_B[:, None]

        self.position_BN.fill_(EMPTY)
        self.position_BN[:, :kept] = torch.where(real_BK, source.position_BN.gather(1, slots_BK), EMPTY)
        self.utility_BN.zero_()
        self.utility_BN[:, :kept] = torch.where(real_BK, source.utility_BN.gather(1, slots_BK), 0.0)
        self.free_B.copy_(count_B)
        for mine, theirs in zip(self.layers, source.layers, strict=True):
            mine.allocate()
            mine.fill_from(theirs, slots_BK, counts)
            if release:
                theirs.release()
