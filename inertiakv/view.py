"""What one forward pass sees of a cache: the object that the model says `attend` to.

Shape letters: B batch, T query tokens, H query heads, G KV heads, N slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from . import scorers
from .aggregation import Aggregation, updated
from .attention import Backend, dense_chunk, dense_step, flex, flex_mask, flex_step, visible
from .cache import SlotCache


class CacheView:
    """One pass of T tokens a row over a cache: writes their K and V, attends, and scores where asked.

    A position of -1 marks padding, which sees nothing and is seen by nobody. Masks are made here once, for
    each sliding window that the model's layers have, and shared by its layers.
    """

    def __init__(
        self,
        cache: SlotCache,
        positions_BT: Tensor,
        slots_BT: Tensor,
        *,
        backend: Backend,
        windows: Collection[int | None],
        aggregation: Aggregation | None = None,
        active_B: Tensor | None = None,
        end_slot: int | None = None,
        start_slot: int | None = None,
    ) -> None:
        """`aggregation`: score this pass (T = 1) and update the utilities of rows that are `active_B`.
        `end_slot`: no slot from here on holds a token, and the chunk's own tokens are the last before it, in
        the row where they reach furthest; it may lie beyond the cache where another row's padding does.
        `start_slot`: given where the chunk's tokens begin at the same slot in every row, and all slots before
        it hold tokens that are older."""
        self.cache, self.slots_BT, self.positions_BT = cache, slots_BT, positions_BT
        self.backend = backend
        self.end_slot = cache.shape.slots if end_slot is None else end_slot
        self.start_slot = start_slot
        self.filled = cache.shape.slots if backend == "flex" else min(self.end_slot, cache.shape.slots)
        self.position_BN = cache.position_BN[:, : self.filled]
        single = positions_BT.shape[1] == 1
        self.visible_BN = {w: visible(self.position_BN, positions_BT, w)[:, 0] for w in windows if single}
        self.block_mask = {
            w: flex_mask(self.position_BN, positions_BT, w) for w in windows if backend == "flex"
        }
        self.utility_BN: Tensor | None = None
        if aggregation is not None:
            assert single, "only a single query a row is scored"
            assert active_B is not None
            self.utility_BN = cache.utility_BN[:, : self.filled]
            self.scored_BN = (self.position_BN >= 0) & active_B[:, None]
            self.coefficients = aggregation.by_layer()

    def run_layer(self, layer: Callable[..., Tensor], x_BTE: Tensor, *args: Any) -> Tensor:
        """`layer(x_BTE, *args, cache)`, as a region of its own to the compiler, which compiles layers that
        are alike once. A model may also call its layers directly."""
        if self.utility_BN is None:
            return _region(layer, x_BTE, args, self)
        if self.backend == "flex":
            # Around FlexAttention a region would hand out the utilities as they went in: a compiler defect.
            return layer(x_BTE, *args, self)
        x_BTE, utility_BN = _scored_region(layer, x_BTE, args, self, self.utility_BN)
        self.utility_BN.copy_(utility_BN)
        return x_BTE

    def attend(
        self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int | None, scale: float
    ) -> Tensor:
        """Write the new tokens' K and V, attend over everything visible, [B, H, T, D]; score if this pass
        does."""
        out_BHTD, weights_BGRN = self.write_and_attend(layer, q_BHTD, k_BGTD, v_BGTD, window, scale)
        if self.utility_BN is not None:
            self.utility_BN.copy_(self.scored(self.utility_BN, weights_BGRN, layer))
        return out_BHTD

    def write_and_attend(
        self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, window: int | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and where this pass scores the weights [B, G, R, N]."""
        kv = self.cache.layers[layer]
        kv.write(self.slots_BT, k_BGTD, v_BGTD)
        k_BGND, v_BGND = kv.k_BGND[:, :, : self.filled], kv.v_BGND[:, :, : self.filled]
        if self.backend == "flex" and self.utility_BN is None:
            return flex(q_BHTD, k_BGND, v_BGND, self.block_mask[window], scale), None
        if self.positions_BT.shape[1] > 1:
            seen = (self.position_BN, self.positions_BT, window)
            slots = (self.end_slot, self.start_slot)
            return dense_chunk(q_BHTD, k_BGND, v_BGND, *seen, scale, *slots), None
        q_BHD, seen_BN = q_BHTD[:, :, 0], self.visible_BN[window]
        if self.backend == "flex":
            out_BHD, weights_BGRN = flex_step(q_BHD, k_BGND, v_BGND, self.block_mask[window], seen_BN, scale)
        else:
            out_BHD, weights_BGRN = dense_step(q_BHD, k_BGND, v_BGND, seen_BN, scale)
        return out_BHD[:, :, None], weights_BGRN

    def scored(self, utility_BN: Tensor, weights_BGRN: Tensor | None, layer: int) -> Tensor:
        """The utilities after a layer's attention weights."""
        assert weights_BGRN is not None
        return updated(utility_BN, scorers.attention(weights_BGRN), self.scored_BN, self.coefficients[layer])


class _LayerView:
    """The view of one layer inside its region, and the utilities on their way through it.

    They go into the region and come out. Written in place, as K and V are, they would be read too early
    afterwards: the compiler does not see what a region writes, and nothing but the region itself reads K and
    V.
    """

    def __init__(self, whole: CacheView, utility_BN: Tensor | None) -> None:
        self.whole, self.utility_BN = whole, utility_BN

    def attend(
        self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int | None, scale: float
    ) -> Tensor:
        out_BHTD, weights_BGRN = self.whole.write_and_attend(layer, q_BHTD, k_BGTD, v_BGTD, window, scale)
        if self.utility_BN is not None:
            self.utility_BN = self.whole.scored(self.utility_BN, weights_BGRN, layer)
        return out_BHTD


@torch.compiler.nested_compile_region
def _region(layer: Callable[..., Tensor], x_BTE: Tensor, args: tuple[Any, ...], view: CacheView) -> Tensor:
    return layer(x_BTE, *args, _LayerView(view, None))


@torch.compiler.nested_compile_region
def _scored_region(
    layer: Callable[..., Tensor], x_BTE: Tensor, args: tuple[Any, ...], view: CacheView, utility_BN: Tensor
) -> tuple[Tensor, Tensor]:
    inner = _LayerView(view, utility_BN)
    x_BTE = layer(x_BTE, *args, inner)
    assert inner.utility_BN is not None
    return x_BTE, inner.utility_BN
