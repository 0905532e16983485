"""A forward pass over the cache: what the model runs its layers with, and what a layer attends through.

Where all layers share their retention sets, new tokens are entered before the first layer and one is evicted
after the last. Where each layer has its own, all of that happens within the layer. Where several processes
share the sets, they take the mean of their utilities once the last layer has scored.

Shape letters: B batch, T query tokens, H query heads, G KV heads, R queries of a KV head, X retention sets, N
slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..attention.dense import Softmax, dense_chunk, dense_step, observed
from ..attention.flex import flex, flex_mask, flex_step
from ..attention.forward_state import ForwardState
from ..attention.mask import block_lists, visible
from ..cache.retention import EMPTY, RetentionSets
from ..cache.slot_cache import LayerCache, SlotCache
from ..compiling.collectives import TensorParallel
from ..compiling.regions import flatten, region, unflatten
from ..config import OF_ATTENTION
from ..eviction.pooling import Pooling, pooled
from ..eviction.protection import Limits, protected
from ..eviction.rule import evict_one
from ..scoring.aggregation import Coefficients, updated
from ..scoring.expected_attention import Rotations
from ..scoring.scorers import SCORERS, Evidence, by_set


def enter(sets: RetentionSets, state: ForwardState) -> ForwardState:
    """Put the pass's new tokens into retention sets, in place; the state with what the queries see then."""
    if state.slots_BT is None:
        slots_BXT = sets.free_BX[..., None]
    else:
        slots_BXT = state.slots_BT[:, None].expand(-1, sets.free_BX.shape[1], -1)
    new = state.query_BT.shape[1] if state.new is None else state.new
    if new:
        position_BT = state.query_BT[:, -new:]
        if state.active_B is not None:
            position_BT = position_BT.where(state.active_B[:, None], EMPTY)
        mean_BX = None
        if state.mean_B is not None:
            mean_BX = sets.mean_utility().where(state.mean_B[:, None], 0.0)
        sets.insert(slots_BXT, position_BT)
        if mean_BX is not None:
            sets.utility_BXN.scatter_(-1, slots_BXT, mean_BX[..., None].expand(slots_BXT.shape))

    slots = sets.position_BXN.shape[-1]
    slots_used = slots if state.slots_used is None else state.slots_used
    flex_runs, single = state.backend == "flex", state.query_BT.shape[1] == 1
    position_BXN = sets.position_BXN if flex_runs else sets.position_BXN[..., : min(slots_used, slots)]
    seen = (position_BXN, state.query_BT)
    return state._replace(
        slots_used=slots_used,
        slots_BXT=slots_BXT[..., :new],
        position_BXN=position_BXN,
        visible_BXTN=tuple(visible(*seen, window) for window in state.windows if single),
        blocks=tuple(block_lists(*seen, window) for window in state.windows if flex_runs),
    )


def leave(sets: RetentionSets, state: ForwardState) -> None:
    """Evict from retention sets after a pass, where the pass does."""
    if state.limits is None:
        return
    assert state.active_B is not None
    utility_BXN = sets.utility_BXN
    protected_BXN = protected(sets.position_BXN, state.query_BT[:, -1], state.limits)
    if state.by_age:
        utility_BXN = torch.zeros_like(utility_BXN)
    elif state.pooling is not None:
        utility_BXN = pooled(sets.position_BXN, utility_BXN, protected_BXN, state.pooling)
    evict_one(sets, utility_BXN, protected_BXN, state.active_B)


class ForwardPass:
    """Enters the new tokens, where all layers share their retention sets; then run the model with it, and
    call `finish`. Each layer writes its K and V, attends, and scores where the pass does. Masks are made once
    for all layers that share retention sets."""

    def __init__(
        self, cache: SlotCache, state: ForwardState, coefficients: dict[int, Coefficients] | None = None
    ) -> None:
        """`coefficients`: of the layers that score, where `state` has a scorer."""
        self.cache, self.state = cache, state
        self.shared = cache.shape.scope == "shared"
        self.coefficients = coefficients if coefficients is not None and state.scorer else {}
        self.layer_scores: dict[int, Tensor] = {}  # of each layer, where the pass records them
        if self.shared:
            state = enter(cache.retention[0], state)
            self._filled = state.position_BXN.shape[-1]  # type: ignore[union-attr]
            # What layers do not look at would only be compared by the compiler, layer by layer.
            state = state._replace(slots_BT=None, active_B=None, mean_B=None, limits=None, pooling=None)
        self._scoring = flatten(state)
        self._plain = flatten(
            state._replace(scorer=None, scored_B=None, learned=None, rotations=None, record=False)
        )

    def run_layer(self, index: int, layer: Callable[..., Tensor], x_BTE: Tensor, *args: Any) -> Tensor:
        """`layer(x_BTE, *args, layer_pass)`, as a region of its own to the compiler, which traces and
        compiles layers that are alike once."""
        coefficients, sets, utility_BXN = self.coefficients.get(index), None, None
        if not self.shared:
            sets = self.cache.retention[index]
        elif coefficients is not None:
            utility_BXN = self.cache.retention[0].utility_BXN[..., : self._filled]
        common = self._plain if coefficients is None else self._scoring
        own = (layer, self.cache.layers[index], sets, x_BTE, args, utility_BXN, coefficients)
        x_BTE, *scored = _layer(*common, *flatten(*own))
        if utility_BXN is not None:
            new_BXN, *score = scored
            utility_BXN.copy_(self.state.tp.mean(new_BXN) if index == max(self.coefficients) else new_BXN)
            if score:
                self.layer_scores[index] = score[0]
        return x_BTE

    def finish(self) -> None:
        """Evict, where the layers have not done it themselves."""
        if self.shared:
            leave(self.cache.retention[0], self.state)


class LayerPass:
    """What one layer attends through.

    Utilities go in and come out again: within a pass only the region itself may read what it writes in place,
    as it does K and V.
    """

    def __init__(
        self,
        kv: LayerCache,
        state: ForwardState,
        utility_BXN: Tensor | None = None,
        coefficients: Coefficients | None = None,
    ) -> None:
        self.kv, self.state = kv, state
        self.utility_BXN, self.coefficients = utility_BXN, coefficients
        # A list: an attribute set after FlexAttention is lost in a region (test_compiler_defects.py).
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
        state = self.state
        assert state.slots_BXT is not None
        assert state.position_BXN is not None
        new, filled = state.slots_BXT.shape[-1], state.position_BXN.shape[-1]
        if new:
            self.kv.write(state.slots_BXT, k_BGTD[:, :, -new:], v_BGTD[:, :, -new:])
        k_BGND, v_BGND = self.kv.k_BGND[:, :, :filled], self.kv.v_BGND[:, :, :filled]
        weighs = self.coefficients is not None and state.scorer in OF_ATTENTION
        out_BHTD, weights_BGRN = attention(state, q_BHTD, k_BGND, v_BGND, window, scale, softmax, weighs)
        if self.coefficients is not None:
            assert self.utility_BXN is not None
            assert state.scorer is not None
            assert state.scored_B is not None
            evidence = Evidence(state, q_BHTD, k_BGND, v_BGND, scale, weights_BGRN, self.coefficients.salt)
            score_BXN = by_set(SCORERS[state.scorer](evidence), state.position_BXN.shape[1])
            scored_BXN = evidence.occupied_BXN & state.scored_B[:, None, None]
            self.scored.append(updated(self.utility_BXN, score_BXN, scored_BXN, self.coefficients.smoothing))
            if state.record:
                self.scored.append(score_BXN)
        return out_BHTD


def attention(
    state: ForwardState,
    q_BHTD: Tensor,
    k_BGND: Tensor,
    v_BGND: Tensor,
    window: int | None,
    scale: float,
    softmax: Softmax | None,
    weighs: bool,
) -> tuple[Tensor, Tensor | None]:
    """The output [B, H, T, D], and the weights [B, G, R, N] where the pass `weighs` tokens by them."""
    position_BXN = state.position_BXN
    assert position_BXN is not None
    assert state.slots_used is not None
    single, which = q_BHTD.shape[2] == 1, state.windows.index(window)
    if state.backend == "flex":
        assert softmax is None
        group = q_BHTD.shape[1] // k_BGND.shape[1]
        mask = flex_mask(state.blocks[which], position_BXN, state.query_BT, window, group)
        if not weighs:
            return flex(q_BHTD, k_BGND, v_BGND, mask, scale), None
        visible_BXN = state.visible_BXTN[which][:, :, 0]
        out_BHD, weights = flex_step(q_BHTD[:, :, 0], k_BGND, v_BGND, mask, visible_BXN, scale)
    elif single and softmax is None:
        visible_BXN = state.visible_BXTN[which][:, :, 0]
        out_BHD, weights = dense_step(q_BHTD[:, :, 0], k_BGND, v_BGND, visible_BXN, scale)
    elif weighs:
        visible_BXTN = visible(position_BXN, state.query_BT, window)
        return observed(q_BHTD, k_BGND, v_BGND, visible_BXTN, scale, softmax)
    else:
        seen = (position_BXN, state.query_BT, window)
        ends = (state.slots_used, state.slots_before)
        return dense_chunk(q_BHTD, k_BGND, v_BGND, *seen, scale, *ends, softmax), None
    return out_BHD[:, :, None], weights


_KINDS = (ForwardState, Coefficients, Rotations, Limits, Pooling, TensorParallel, Softmax)


@region
def _layer(*flat: Any) -> tuple[Tensor, ...]:
    """The output; where the layer scores in shared sets the new utilities, and where it records its scores. A
    layer with sets of its own enters, scores and evicts in here."""
    (state,), rest = unflatten(flat, _KINDS)
    (layer, kv, sets, x_BTE, args, utility_BXN, coefficients), _ = unflatten(rest, _KINDS)
    if sets is None:
        layer_pass = LayerPass(kv, state, utility_BXN, coefficients)
        x_BTE = layer(x_BTE, *args, layer_pass)
        return x_BTE, *layer_pass.scored
    state = enter(sets, state)
    assert state.position_BXN is not None
    utility_BXN = sets.utility_BXN[..., : state.position_BXN.shape[-1]]
    layer_pass = LayerPass(kv, state, utility_BXN, coefficients)
    x_BTE = layer(x_BTE, *args, layer_pass)
    if coefficients is not None:
        utility_BXN.copy_(state.tp.mean(layer_pass.scored[0]))
    leave(sets, state)
    return (x_BTE,)
