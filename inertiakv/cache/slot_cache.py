"""The slot cache: static K and V buffers, and the retention sets that say which token is in which slot.

Shape letters: B batch, T query tokens, L layers, G KV heads, X retention sets of a layer (1 or G), N slots, D
head dim, K slots kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..compiling.numerics import accumulation_dtype
from ..config import Scope
from .retention import EMPTY, RetentionSets, TensorState

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
    scope: Scope = "shared"

    @property
    def retention_layers(self) -> int:
        return 1 if self.scope == "shared" else self.layers

    @property
    def sets(self) -> int:
        """Retention sets of a row that share one `RetentionSets`."""
        return self.kv_heads if self.scope == "head" else 1

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of K and V in all layers."""
        return 2 * self.layers * self.batch * self.kv_heads * self.slots * self.head_dim * dtype.itemsize


class LayerCache(TensorState):
    """K (after RoPE) and V of one layer, [B, G, N, D] each. Made without memory: `allocate` gives it."""

    k_BGND: Tensor
    v_BGND: Tensor

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._size = (shape.batch, shape.kv_heads, shape.slots, shape.head_dim)
        self.add("k_BGND", torch.empty(0, dtype=dtype, device=device))
        self.add("v_BGND", torch.empty(0, dtype=dtype, device=device))

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

    def write(self, slots_BXT: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Put new tokens' K and V into their slots, in place."""
        batch, heads = k_BGTD.shape[:2]
        row_B11 = torch.arange(batch, device=slots_BXT.device)[:, None, None]
        head_G1 = torch.arange(heads, device=slots_BXT.device)[:, None]
        slots_BGT = slots_BXT.expand(-1, heads, -1)
        self.k_BGND[row_B11, head_G1, slots_BGT] = k_BGTD
        self.v_BGND[row_B11, head_G1, slots_BGT] = v_BGTD

    def fill_from(self, source: LayerCache, slots_BXK: Tensor, counts: list[list[int]]) -> None:
        """Copy the first `counts[b][x]` of `source`'s slots `slots_BXK` into set x's first slots and zero the
        others. Set by set, so that the only memory it takes beyond its own is one set's kept tokens."""
        heads = self.k_BGND.shape[1] // slots_BXK.shape[1]
        for mine_BGND, theirs_BGND in ((self.k_BGND, source.k_BGND), (self.v_BGND, source.v_BGND)):
            for row, of_row in enumerate(counts):
                for x, kept in enumerate(of_row):
                    own = slice(x * heads, (x + 1) * heads)
                    mine_BGND[row, own, :kept] = theirs_BGND[row, own].index_select(
                        1, slots_BXK[row, x, :kept]
                    )
                    mine_BGND[row, own, kept:] = 0


class SlotCache(nn.Module):
    """K and V of all layers, and their retention sets: one for all layers (the paper's), one
    for each, or one for each with a set for every KV head.

    A module with buffers, which compiled graphs read and write in place at fixed addresses.
    """

    layers: Sequence[LayerCache]
    retention: Sequence[RetentionSets]

    def __init__(
        self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device | str, allocate: bool = True
    ) -> None:
        super().__init__()
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        score_dtype = accumulation_dtype(dtype)
        layers = nn.ModuleList(LayerCache(shape, dtype, self.device) for _ in range(shape.layers))
        retention = nn.ModuleList(
            RetentionSets(shape.batch, shape.sets, shape.slots, score_dtype, self.device)
            for _ in range(shape.retention_layers)
        )
        self.layers, self.retention = layers, retention  # type: ignore[assignment]
        if allocate:
            self.allocate()

    def sets_of(self, layer: int) -> RetentionSets:
        """The retention sets of a layer."""
        return self.retention[0 if self.shape.scope == "shared" else layer]

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
    def most_B(self) -> Tensor:
        """Tokens in the fullest set of each row, int64."""
        return torch.stack([sets.count_BX.amax(-1) for sets in self.retention]).amax(0)

    @property
    def mean_B(self) -> Tensor:
        """Tokens that each row holds in the mean over its sets, float64."""
        return torch.stack([sets.count_BX.double().mean(-1) for sets in self.retention]).mean(0)

    @property
    def kept_tokens(self) -> list[float]:
        """`mean_B`, with whole numbers as such."""
        return [int(n) if n.is_integer() else n for n in self.mean_B.tolist()]

    @property
    def overfull_B(self) -> Tensor:
        """Whether a row has a set that holds more than its budget."""
        over = [(sets.count_BX > sets.budget_BX).any(-1) for sets in self.retention]
        return torch.stack(over).any(0)

    @property
    def filled(self) -> int:
        """The first slot after all tokens, in a cache that was filled from its first slot on."""
        return int(torch.stack([sets.free_BX.max() for sets in self.retention]).max())

    def slots_for(self, new_tokens: int, keep_BXN: Sequence[Tensor] | None = None) -> int:
        """Slots to allocate for these tokens, or those marked, and `new_tokens` more; at most the largest
        budget and one."""
        masks = self.everything() if keep_BXN is None else keep_BXN
        used = [
            torch.minimum(sets.budget_BX + 1, kept_BXN.sum(-1) + new_tokens + 1).max()
            for sets, kept_BXN in zip(self.retention, masks, strict=True)
        ]
        return bucket(int(torch.stack(used).max()))

    def clear(self) -> None:
        """Forget everything. V is zeroed as well: a NaN left by a former request would outlive its token,
        since the weight 0 of an unseen slot times NaN is NaN."""
        for sets in self.retention:
            sets.clear()
        for layer in self.layers:
            layer.v_BGND.zero_()

    def everything(self) -> list[Tensor]:
        """Masks that mark all tokens, as `take_from` wants them."""
        return [sets.position_BXN > EMPTY for sets in self.retention]

    def keep(self, keep_BXN: Sequence[Tensor]) -> None:
        """Evict all tokens but those marked in each of `retention`, in place."""
        for sets, kept_BXN in zip(self.retention, keep_BXN, strict=True):
            sets.keep(kept_BXN)

    def forget_from(self, position_B: Tensor) -> None:
        """Drop the tokens at these positions and after them. Every set must have an empty slot then."""
        for sets in self.retention:
            occupied_BXN = sets.position_BXN > EMPTY
            sets.keep(occupied_BXN & (sets.position_BXN < position_B[:, None, None]))

    def copy_prompt(self, source: SlotCache, tokens: int) -> None:
        """Hold what `source`, of which nothing was evicted, holds in its first `tokens` slots."""
        theirs = source.retention[0]
        for sets in self.retention:
            sets.position_BXN[..., :tokens] = theirs.position_BXN[:, :1, :tokens]
            sets.free_BX.copy_(theirs.free_BX[:, :1].expand_as(sets.free_BX))
        for mine, layer in zip(self.layers, source.layers, strict=True):
            mine.k_BGND[:, :, :tokens] = layer.k_BGND[:, :, :tokens]
            mine.v_BGND[:, :, :tokens] = layer.v_BGND[:, :, :tokens]

    def take_from(self, source: SlotCache, keep_BXN: Sequence[Tensor], *, release: bool) -> None:
        """Become a copy of the tokens that the masks mark in `source`, a mask for each of `retention`,
        oldest first, with their utilities and budgets.

        Works layer by layer, allocating memory here and, with `release`, freeing the source's: at the peak
        one layer of this cache lies beside the source.
        """
        taken = zip(self.retention, source.retention, keep_BXN, strict=True)
        moved = [mine_sets.take_from(theirs, kept_BXN) for mine_sets, theirs, kept_BXN in taken]
        if self.shape.scope == "shared":
            moved *= self.shape.layers
        for mine, their_layer, (slots_BXK, counts) in zip(self.layers, source.layers, moved, strict=True):
            mine.allocate()
            mine.fill_from(their_layer, slots_BXK, counts)
            if release:
                their_layer.release()
