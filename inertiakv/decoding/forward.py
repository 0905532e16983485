"""What one forward pass sees of a cache: the object that runs a model's layers, and the one that they say
`attend` to.

Where all layers share one table, it takes the new tokens before the first layer and evicts after the last.
Where each has its own, all of that happens within the layer. Where ranks share a table, they take the mean of
their utilities once the last of its layers has scored.

Shape letters: B batch, T query tokens, H query heads, G KV heads, R queries of a KV head, X retention sets, N
slots, D head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..attention.backend import Backend
from ..attention.dense import Softmax, dense_chunk, dense_step, observed
from ..attention.flex import flex, flex_mask, flex_step
from ..attention.mask import BlockLists, block_lists, visible
from ..cache.retention import EMPTY, RetentionSets
from ..cache.slot_cache import LayerCache, SlotCache
from ..compiling.collectives import SINGLE_PROCESS, TensorParallel
from ..config import OF_ATTENTION, ScorerName
from ..eviction.pooling import Pooling, pooled
from ..eviction.protection import Limits, protected
from ..eviction.rule import evict_one
from ..scoring.aggregation import Aggregation, Coefficients, updated
from ..scoring.expected_attention import Rotations
from ..scoring.learned import LearnedScorer
from ..scoring.scorers import SCORERS, Evidence, by_set
from .regions import flat, nested

# Layers that read their own index, say, are all unlike: that is slow to compile, but no error.
_ANY_NUMBER: dict[str, Any] = (
    {"max_reuse_entries": 1 << 20}
    if "max_reuse_entries" in inspect.signature(torch.compiler.nested_compile_region).parameters
    else {}
)


class Pass(NamedTuple):
    """What a pass does, the same for all tables. Tensors and constants alone, of which the compiler can tell
    whether a region's inputs are alike."""

    positions_BT: Tensor
    """Of the queries; -1 marks padding, which sees nothing and is seen by nobody."""
    slots_BT: Tensor | None
    """Where new tokens go; None: one for each row, in each set's free slot."""
    backend: Backend
    windows: tuple[int | None, ...]
    active_B: Tensor | None = None
    """Rows that take part; None: all."""
    new: int | None = None
    """How many of the queries are new tokens, the last ones; None: all. The others are in the cache
    already."""
    mean_B: Tensor | None = None
    """Rows whose new tokens start from the mean utility of those before them, and not from 0; None: none."""
    evict: Limits | None = None
    """Evict a token afterwards in each full set, but not what this protects."""
    by_age: bool = False
    """Evict the oldest, whatever the utilities are."""
    pool: Pooling | None = None
    """Pool utilities before evicting by them."""
    end_slot: int | None = None
    """No slot from here on holds a token, and the queries' own tokens are the last before it, in the row
    where they reach furthest; it may lie beyond the cache where another row's padding does."""
    start_slot: int | None = None
    """Given where the queries' tokens begin at the same slot in every set, and all slots before it hold
    tokens that are older."""


class Seen(NamedTuple):
    """What a pass knows of a table's slots."""

    positions_BT: Tensor
    slots_BXT: Tensor
    position_BXN: Tensor
    visible_BXTN: dict[int | None, Tensor]
    """Of a single query."""
    blocks: dict[int | None, BlockLists]
    backend: Backend
    end_slot: int
    start_slot: int | None


class Scoring(NamedTuple):
    """How layers score."""

    scorer: ScorerName
    scored_B: Tensor
    learned: LearnedScorer | None
    rotations: Rotations | None
    by: Literal["mean", "max"]
    record: bool
    tp: TensorParallel


def enter(table: RetentionSets, step: Pass) -> Seen:
    """Put the pass's new tokens into a table; what it sees then."""
    sets = table.free_BX.shape[1]
    if step.slots_BT is None:
        slots_BXT = table.free_BX[..., None]
    else:
        slots_BXT = step.slots_BT[:, None].expand(-1, sets, -1)
    new = step.positions_BT.shape[1] if step.new is None else step.new
    active_B1 = None if step.active_B is None else step.active_B[:, None]
    if new:
        positions_BT = step.positions_BT[:, -new:]
        mean_BX = None if step.mean_B is None else table.mean_utility().where(step.mean_B[:, None], 0.0)
        table.insert(slots_BXT, positions_BT if active_B1 is None else positions_BT.where(active_B1, EMPTY))
        if mean_BX is not None:
            table.utility_BXN.scatter_(-1, slots_BXT, mean_BX[..., None].expand(slots_BXT.shape))
    return _look(table, step, slots_BXT[..., :new])


def _look(table: RetentionSets, step: Pass, slots_BXT: Tensor) -> Seen:
    slots = table.position_BXN.shape[-1]
    end_slot = slots if step.end_slot is None else step.end_slot
    filled = slots if step.backend == "flex" else min(end_slot, slots)
    position_BXN = table.position_BXN[..., :filled]
    single = step.positions_BT.shape[1] == 1
    masks = {w: visible(position_BXN, step.positions_BT, w) for w in step.windows if single}
    lists = {
        w: block_lists(position_BXN, step.positions_BT, w) for w in step.windows if step.backend == "flex"
    }
    return Seen(
        step.positions_BT, slots_BXT, position_BXN, masks, lists, step.backend, end_slot, step.start_slot
    )


def leave(table: RetentionSets, step: Pass) -> None:
    """Evict from a table after a pass, where the pass does."""
    if step.evict is None:
        return
    assert step.active_B is not None
    utility_BXN = table.utility_BXN
    protected_BXN = protected(table.position_BXN, step.positions_BT[:, -1], step.evict)
    if step.by_age:
        utility_BXN = torch.zeros_like(utility_BXN)
    elif step.pool is not None:
        utility_BXN = pooled(table.position_BXN, utility_BXN, protected_BXN, *step.pool)
    evict_one(table, utility_BXN, protected_BXN, step.active_B)


class CacheView:
    """One pass of T tokens a row over a cache: each layer writes their K and V, attends, and scores where
    asked. Masks are made once a table, for each sliding window that the model's layers have."""

    def __init__(
        self,
        cache: SlotCache,
        step: Pass,
        aggregation: Aggregation | None = None,
        *,
        due: Tensor | None = None,
        rotations: Rotations | None = None,
        by: Literal["mean", "max"] = "mean",
        record: bool = False,
        tp: TensorParallel = SINGLE_PROCESS,
    ) -> None:
        """`aggregation`: score this pass and update the utilities of rows that are active; where `due`, bool
        [1], is not true, they stay. `rotations`: of its queries, for the scorer `expected_attention`. `by`:
        what several queries make of their scores. `record`: keep the layers' scores, in `scores`. `ranks`:
        those that hold the model."""
        self.layers, self.retention, self.step = cache.layers, cache.retention, step
        self.shared = cache.shape.scope == "shared"
        self.record = record
        self.tp = SINGLE_PROCESS if cache.shape.scope == "head" else tp  # a head's set is its own rank's
        self.scores: dict[int, Tensor] = {}
        if self.shared:
            self.seen = enter(self.retention[0], step)
        # What is the same for all layers, for those that score, and what is each one's own.
        common = self.seen if self.shared else step
        self.same = self.same_scoring = flat(common, None)
        self.coefficients: dict[int, Coefficients] = {}
        if aggregation is not None:
            assert step.active_B is not None
            scored_B = step.active_B if due is None else step.active_B & due
            how = (aggregation.scorer, scored_B, aggregation.learned, rotations, by, record, self.tp)
            self.same_scoring = flat(common, Scoring(*how))
            self.coefficients = aggregation.by_layer()

    def run_layer(self, index: int, layer: Callable[..., Tensor], x_BTE: Tensor, *args: Any) -> Tensor:
        """`layer(x_BTE, *args, view)` with the view of layer `index`, as a region of its own to the compiler,
        which traces and compiles layers that are alike once."""
        kv, coefficients = self.layers[index], self.coefficients.get(index)
        same = self.same if coefficients is None else self.same_scoring
        if not self.shared:
            return _own_region(*same, *flat(layer, kv, self.retention[index], x_BTE, args, coefficients))
        if coefficients is None:
            return _region(*same, *flat(layer, kv, x_BTE, args))
        utility_BXN = self.retention[0].utility_BXN[..., : self.seen.position_BXN.shape[-1]]
        x_BTE, *scored = _scored_region(*same, *flat(layer, kv, x_BTE, args, utility_BXN, coefficients))
        utility_BXN.copy_(self.tp.mean(scored[0]) if index == max(self.coefficients) else scored[0])
        if self.record:
            self.scores[index] = scored[1]
        return x_BTE

    def finish(self) -> None:
        """After the last layer: evict, where the layers have not done it themselves."""
        if self.shared:
            leave(self.retention[0], self.step)


class LayerView:
    """The view of one layer, and the utilities on their way through it.

    They go in and come out again. Written in place, as K and V are, they would be read too early afterwards:
    the compiler does not see what a region writes, and nothing but the region itself reads K and V.
    """

    def __init__(
        self,
        kv: LayerCache,
        seen: Seen,
        scoring: Scoring | None = None,
        utility_BXN: Tensor | None = None,
        coefficients: Coefficients | None = None,
    ) -> None:
        self.kv, self.seen, self.scoring = kv, seen, scoring
        self.utility_BXN, self.coefficients = utility_BXN, coefficients
        # A list: a new value of an attribute would be lost around FlexAttention, a compiler defect.
        self.scored: list[Tensor] = []

    def attend(
        self,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        *,
        window: int | None,
        scale: float,
        softmax: Softmax | None = None,
    ) -> Tensor:
        """Write the new tokens' K and V, attend over everything visible, [B, H, T, D]; score if this pass
        does. Only dense attention knows another `softmax`."""
        seen = self.seen
        new, filled = seen.slots_BXT.shape[-1], seen.position_BXN.shape[-1]
        if new:
            self.kv.write(seen.slots_BXT, k_BGTD[:, :, -new:], v_BGTD[:, :, -new:])
        k_BGND, v_BGND = self.kv.k_BGND[:, :, :filled], self.kv.v_BGND[:, :, :filled]
        weighs = self.scoring is not None and self.scoring.scorer in OF_ATTENTION
        out_BHTD, weights_BGRN = self._attention(q_BHTD, k_BGND, v_BGND, window, scale, softmax, weighs)
        if self.scoring is not None:
            self._score(self.scoring, q_BHTD, k_BGND, v_BGND, weights_BGRN, scale)
        return out_BHTD

    def _attention(
        self,
        q_BHTD: Tensor,
        k_BGND: Tensor,
        v_BGND: Tensor,
        window: int | None,
        scale: float,
        softmax: Softmax | None,
        weighs: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights [B, G, R, N] where the pass `weighs` tokens by them."""
        seen = self.seen
        single = q_BHTD.shape[2] == 1
        if seen.backend == "flex":
            assert softmax is None
            group = q_BHTD.shape[1] // k_BGND.shape[1]
            mask = flex_mask(seen.blocks[window], seen.position_BXN, seen.positions_BT, window, group)
            if not weighs:
                return flex(q_BHTD, k_BGND, v_BGND, mask, scale), None
            visible_BXN = seen.visible_BXTN[window][:, :, 0]
            out_BHD, weights = flex_step(q_BHTD[:, :, 0], k_BGND, v_BGND, mask, visible_BXN, scale)
        elif single and softmax is None:
            visible_BXN = seen.visible_BXTN[window][:, :, 0]
            out_BHD, weights = dense_step(q_BHTD[:, :, 0], k_BGND, v_BGND, visible_BXN, scale)
        elif weighs:
            visible_BXTN = visible(seen.position_BXN, seen.positions_BT, window)
            return observed(q_BHTD, k_BGND, v_BGND, visible_BXTN, scale, softmax)
        else:
            table = (seen.position_BXN, seen.positions_BT, window)
            ends = (seen.end_slot, seen.start_slot)
            return dense_chunk(q_BHTD, k_BGND, v_BGND, *table, scale, *ends, softmax), None
        return out_BHD[:, :, None], weights

    def _score(
        self,
        scoring: Scoring,
        q_BHTD: Tensor,
        k_BGND: Tensor,
        v_BGND: Tensor,
        weights_BGRN: Tensor | None,
        scale: float,
    ) -> None:
        assert self.utility_BXN is not None
        assert self.coefficients is not None
        seen, (smoothing, salt) = self.seen, self.coefficients
        held_BXN = seen.position_BXN > EMPTY
        real_share_B, q_BHD = None, q_BHTD[:, :, 0]
        if q_BHTD.shape[2] > 1:
            real_BT = seen.positions_BT > EMPTY
            real_share_B = real_BT.to(self.utility_BXN.dtype).mean(-1)
            q_BHD = torch.where(real_BT[:, None, :, None], q_BHTD, 0.0).mean(2) / real_share_B[:, None, None]
        evidence = Evidence(
            q_BHD,
            q_BHTD,
            seen.positions_BT,
            scale,
            k_BGND,
            v_BGND,
            weights_BGRN,
            real_share_B,
            scoring.by,
            held_BXN,
            seen.position_BXN,
            salt,
            scoring.learned,
            scoring.rotations,
            scoring.tp,
        )
        score_BXN = by_set(SCORERS[scoring.scorer](evidence), held_BXN.shape[1])
        scored_BXN = held_BXN & scoring.scored_B[:, None, None]
        self.scored.append(updated(self.utility_BXN, score_BXN, scored_BXN, smoothing))
        if scoring.record:
            self.scored.append(score_BXN)


_KINDS = (Seen, Scoring, Coefficients, Rotations, Pass, Limits, Pooling, TensorParallel)


@torch.compiler.nested_compile_region(**_ANY_NUMBER)
def _region(*flat_args: Any) -> Tensor:
    (seen, _), rest = nested(flat_args, _KINDS)
    (layer, kv, x_BTE, args), _ = nested(rest)
    return layer(x_BTE, *args, LayerView(kv, seen))


@torch.compiler.nested_compile_region(**_ANY_NUMBER)
def _scored_region(*flat_args: Any) -> tuple[Tensor, ...]:
    (seen, scoring), rest = nested(flat_args, _KINDS)
    (layer, kv, x_BTE, args, utility_BXN, coefficients), _ = nested(rest, _KINDS)
    view = LayerView(kv, seen, scoring, utility_BXN, coefficients)
    x_BTE = layer(x_BTE, *args, view)
    return x_BTE, *view.scored


@torch.compiler.nested_compile_region(**_ANY_NUMBER)
def _own_region(*flat_args: Any) -> Tensor:
    (step, scoring), rest = nested(flat_args, _KINDS)
    (layer, kv, table, x_BTE, args, coefficients), _ = nested(rest, _KINDS)
    seen = enter(table, step)
    utility_BXN = table.utility_BXN[..., : seen.position_BXN.shape[-1]]
    view = LayerView(kv, seen, scoring, utility_BXN, coefficients)
    x_BTE = layer(x_BTE, *args, view)
    if scoring is not None:
        utility_BXN.copy_(scoring.tp.mean(view.scored[0]))
    leave(table, step)
    return x_BTE
