"""What one forward pass sees of a cache: the object that the model says `attend` to.

Shape letters: B batch, T query tokens, H query heads, G KV heads, N slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from . import scorers
from .aggregation import Aggregation
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
    ) -> None:
        """`aggregation`: score this pass (T = 1) and update the utilities of rows that are `active_B`.
        `end_slot`: no slot from here on holds a token, and the chunk's own tokens are the last before it, in
        the row where they reach furthest; it may lie beyond the cache where another row's padding does."""
        self.cache, self.slots_BT, self.positions_BT = cache, slots_BT, positions_BT
        self.backend, self.aggregation = backend, aggregation
        self.end_slot = cache.shape.slots if end_slot is None else end_slot
        self.filled = cache.shape.slots if backend == "flex" else min(self.end_slot, cache.shape.slots)
        self.position_BN = cache.position_BN[:, : self.filled]
        single = positions_BT.shape[1] == 1
        self.visible_BN = {w: visible(self.position_BN, positions_BT, w)[:, 0] for w in windows if single}
        self.block_mask = {
            w: flex_mask(self.position_BN, positions_BT, w) for w in windows if backend == "flex"
        }
        if aggregation is not None:
            assert single, "only a single query a row is scored"
            assert active_B is not None
            self.scored_BN = (self.position_BN >= 0) & active_B[:, None]

    def attend(
        self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int | None, scale: float
    ) -> Tensor:
        """Write the new tokens' K and V, attend over everything visible, [B, H, T, D]; score if this pass
        does."""
        kv = self.cache.layers[layer]
        kv.write(self.slots_BT, k_BGTD, v_BGTD)
        k_BGND, v_BGND = kv.k_BGND[:, :, : self.filled], kv.v_BGND[:, :, : self.filled]
        if self.positions_BT.shape[1] > 1:
            if self.backend == "flex":
                return flex(q_BHTD, k_BGND, v_BGND, self.block_mask[window], scale)
            return dense_chunk(
                q_BHTD, k_BGND, v_BGND, self.position_BN, self.positions_BT, window, scale, self.end_slot
            )
        q_BHD, seen_BN = q_BHTD[:, :, 0], self.visible_BN[window]
        if self.backend == "flex" and self.aggregation is None:
            return flex(q_BHTD, k_BGND, v_BGND, self.block_mask[window], scale)
        if self.backend == "flex":
            out_BHD, weights_BGRN = flex_step(q_BHD, k_BGND, v_BGND, self.block_mask[window], seen_BN, scale)
        else:
            out_BHD, weights_BGRN = dense_step(q_BHD, k_BGND, v_BGND, seen_BN, scale)
        if self.aggregation is not None:
            utility_BN = self.cache.utility_BN[:, : self.filled]
            self.aggregation.update(utility_BN, scorers.attention(weights_BGRN), self.scored_BN, layer)
        return out_BHD[:, :, None]
