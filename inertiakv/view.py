"""What one forward pass sees of a cache: the object that runs a model's layers, and the one that they say
`attend` to.

Shape letters: B batch, T query tokens, H query heads, G KV heads, R query heads a KV head, N slots, D head
dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import scorers
from .aggregation import Aggregation, updated
from .attention import (
    Backend,
    BlockLists,
    block_lists,
    dense_chunk,
    dense_step,
    flex,
    flex_mask,
    flex_step,
    visible,
)
from .cache import LayerCache, SlotCache

# Layers that read their own index, say, are all unlike: that is slow to compile, but no error.
_ANY_NUMBER: dict[str, Any] = (
    {"max_reuse_entries": 1 << 20}
    if "max_reuse_entries" in inspect.signature(torch.compiler.nested_compile_region).parameters
    else {}
)


class CacheView:
    """One pass of T tokens a row over a cache: each layer writes their K and V, attends, and scores where
    asked.

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
        self.layers = cache.layers
        end_slot = cache.shape.slots if end_slot is None else end_slot
        filled = cache.shape.slots if backend == "flex" else min(end_slot, cache.shape.slots)
        position_BN = cache.position_BN[:, :filled]
        single = positions_BT.shape[1] == 1
        self.seen = Seen(
            positions_BT,
            slots_BT,
            position_BN,
            {w: visible(position_BN, positions_BT, w)[:, 0] for w in windows if single},
            {w: block_lists(position_BN, positions_BT, w) for w in windows if backend == "flex"},
            backend,
            end_slot,
            start_slot,
        )
        self.aggregation = aggregation
        if aggregation is not None:
            assert single, "only a single query a row is scored"
            assert active_B is not None
            self.utility_BN = cache.utility_BN[:, :filled]
            self.scored_BN = (position_BN >= 0) & active_B[:, None]
            self.coefficients = aggregation.by_layer()

    def run_layer(self, index: int, layer: Callable[..., Tensor], x_BTE: Tensor, *args: Any) -> Tensor:
        """`layer(x_BTE, *args, view)` with the view of layer `index`, as a region of its own to the compiler,
        which traces and compiles layers that are alike once."""
        kv = self.layers[index]
        if self.aggregation is None:
            return _region(layer, kv, self.seen, x_BTE, args)
        scoring = Scoring(self.scored_BN, *self.coefficients[index])
        x_BTE, utility_BN = _scored_region(layer, kv, self.seen, x_BTE, args, self.utility_BN, scoring)
        self.utility_BN.copy_(utility_BN)
        return x_BTE


class Seen(NamedTuple):
    """What a pass knows of the slots, the same for all its layers. Tensors and constants alone, of which the
    compiler can tell whether a region's inputs are alike."""

    positions_BT: Tensor
    slots_BT: Tensor
    position_BN: Tensor
    visible_BN: dict[int | None, Tensor]
    blocks: dict[int | None, BlockLists]
    backend: Backend
    end_slot: int
    start_slot: int | None


class Scoring(NamedTuple):
    """What a layer's scores become: which slots take them, and how."""

    scored_BN: Tensor
    decay: Tensor
    gain: Tensor


class LayerView:
    """The view of one layer, and the utilities on their way through it.

    They go in and come out again. Written in place, as K and V are, they would be read too early afterwards:
    the compiler does not see what a region writes, and nothing but the region itself reads K and V.
    """

    def __init__(
        self, kv: LayerCache, seen: Seen, utility_BN: Tensor | None, scoring: Scoring | None
    ) -> None:
        self.kv, self.seen, self.utility_BN, self.scoring = kv, seen, utility_BN, scoring
        # A list: a new value of an attribute would be lost around FlexAttention, a compiler defect.
        self.scored: list[Tensor] = []

    def attend(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int | None, scale: float
    ) -> Tensor:
        """Write the new tokens' K and V, attend over everything visible, [B, H, T, D]; score if this pass
        does."""
        self.kv.write(self.seen.slots_BT, k_BGTD, v_BGTD)
        filled = self.seen.position_BN.shape[1]
        k_BGND, v_BGND = self.kv.k_BGND[:, :, :filled], self.kv.v_BGND[:, :, :filled]
        out_BHTD, weights_BGRN = self._attention(q_BHTD, k_BGND, v_BGND, window, scale)
        if self.scoring is not None:
            assert self.utility_BN is not None
            assert weights_BGRN is not None
            scored_BN, *coefficients = self.scoring
            score_BN = scorers.attention(weights_BGRN)
            self.scored.append(updated(self.utility_BN, score_BN, scored_BN, *coefficients))
        return out_BHTD

    def _attention(
        self, q_BHTD: Tensor, k_BGND: Tensor, v_BGND: Tensor, window: int | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and of a single query the weights [B, G, R, N]."""
        seen = self.seen
        if seen.backend == "flex":
            mask = flex_mask(seen.blocks[window], seen.position_BN, seen.positions_BT, window)
            if self.scoring is None:
                return flex(q_BHTD, k_BGND, v_BGND, mask, scale), None
            out_BHD, weights = flex_step(
                q_BHTD[:, :, 0], k_BGND, v_BGND, mask, seen.visible_BN[window], scale
            )
        elif q_BHTD.shape[2] > 1:
            table = (seen.position_BN, seen.positions_BT, window)
            return dense_chunk(q_BHTD, k_BGND, v_BGND, *table, scale, seen.end_slot, seen.start_slot), None
        else:
            out_BHD, weights = dense_step(q_BHTD[:, :, 0], k_BGND, v_BGND, seen.visible_BN[window], scale)
        return out_BHD[:, :, None], weights


@torch.compiler.nested_compile_region(**_ANY_NUMBER)
def _region(
    layer: Callable[..., Tensor], kv: LayerCache, seen: Seen, x_BTE: Tensor, args: tuple[Any, ...]
) -> Tensor:
    return layer(x_BTE, *args, LayerView(kv, seen, None, None))


@torch.compiler.nested_compile_region(**_ANY_NUMBER)
def _scored_region(
    layer: Callable[..., Tensor],
    kv: LayerCache,
    seen: Seen,
    x_BTE: Tensor,
    args: tuple[Any, ...],
    utility_BN: Tensor,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    view = LayerView(kv, seen, utility_BN, scoring)
    x_BTE = layer(x_BTE, *args, view)
    return x_BTE, view.scored[-1]
