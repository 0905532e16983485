"""A conversation whose model runs by itself and calls in layer by layer.

The number of tokens tells what a pass is: several are a prompt or, after an answer, a further turn; one,
once there is a prompt, is a decode step. Everything else is as in `inertiakv.decoding.steps`.

Shape letters: B batch, T tokens of a pass, t those of a part of it, H query heads, G KV heads, N slots, D
head dim, W last queries of a prompt, X retention sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.dense import Softmax
from ..attention.forward_state import ForwardState
from ..cache.budgets import Budgets, set_budgets_after_prompt
from ..cache.retention import EMPTY
from ..cache.slot_cache import CacheShape, SlotCache, bucket
from ..config import MAX_BUDGET, EvictionConfig
from ..decoding.batch import BatchState
from ..decoding.decoding_rule import DecodingRule
from ..decoding.forward import ForwardPass, LayerPass
from ..decoding.steps import chosen, decode_state, evicting_state
from ..scoring.learned import LearnedScorer

ROOM = 256
"""Tokens, or an eighth of those held where that is more, for which a cache grows at a time."""


class Attention(NamedTuple):
    """How a layer attends."""

    window: int | None
    scale: float
    softmax: Softmax | None


@dataclass
class Part:
    """Columns of a pass that are treated alike."""

    forward: ForwardPass
    columns: slice
    active_B: Tensor | None = None
    """Rows that the part brings a token, where it brings one at most."""
    evicts_prompt: bool = False
    """It scores together with the last queries before it, and what stays is chosen after it."""


class LayerwiseConversation:
    """For each pass: `begin`, `attend` in each layer, `end`. Broken off in between, it is of no use."""

    def __init__(
        self,
        eviction: EvictionConfig,
        windows: Sequence[int | None],
        real_BT: Tensor,
        k_BGTD: Tensor,
        learned: LearnedScorer | None,
    ) -> None:
        """`windows`: of each layer. The rest: of the first pass, whose layers are all like the one of
        `k_BGTD`."""
        rows, heads, length, head_dim = k_BGTD.shape
        self.dtype, self.device, self.layers = k_BGTD.dtype, k_BGTD.device, len(windows)
        sizes, where = (self.layers, tuple(windows)), (self.dtype, self.device)
        self.config, self.rule = eviction, DecodingRule(eviction, *sizes, "dense", *where, learned=learned)
        shape = CacheShape(self.layers, rows, heads, bucket(length + 1), head_dim, eviction.scope)
        self.cache = SlotCache(shape, dtype=self.dtype, device=self.device)
        for sets in self.cache.retention:
            sets.budget_BX.fill_(MAX_BUDGET)
        self.batch = BatchState(rows, self.device)
        self.turn_step = 0  # decode steps of this turn: the t of the refresh schedule
        self._first_turn, self._reading = True, False  # a prompt is being read, or a turn
        self._room: float = 0  # tokens that may come before the cache has to grow
        self._parts: list[Part] = []
        self._queries_BHWD: dict[int, Tensor] = {}  # a layer's, of the last tokens read
        self._real_BW = self._order_BW = real_BT[:, :0]
        self._attention: dict[int, Attention] = {}

    def begin(self, real_BT: Tensor) -> None:
        """A pass. Those of its tokens that are not real are padding; a row's last one is real, if any is."""
        length, at_first_step = real_BT.shape[1], self.config.evict_at == "first_step"
        if length == 1 and (self._reading or self.turn_step > 0):
            if self._reading:
                self._end_prompt()
            if self.turn_step == 0 and at_first_step:
                self._parts = [self._evicting_part(real_BT, slice(0, 1))]
            else:
                self._parts = [self._decode_part(real_BT)]
            return
        further = self.turn_step > 0 or not self._first_turn
        if self.turn_step > 0:
            self._first_turn, self.turn_step = False, 0
            self._forget_queries()
        self._hold(real_BT)
        if further and at_first_step:  # the turn's last token is the first step of a new refresh schedule
            self._parts = [
                self._chunk_part(real_BT[:, :-1]),
                self._evicting_part(real_BT[:, -1:], slice(length - 1, length)),
            ]
        else:
            self._parts, self._reading = [self._chunk_part(real_BT)], True

    def check(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Raise ValueError where a layer's K and V are not like those of the others."""
        shape = self.cache.shape
        for name, x in (("K", k_BGTD), ("V", v_BGTD)):
            size = (x.shape[1], x.shape[3], x.dtype, x.device)
            if size != (shape.kv_heads, shape.head_dim, self.dtype, self.device):
                raise ValueError(
                    f"{name} of layer {layer} has {size[0]} heads of {size[1]}, {x.dtype} on {x.device}; "
                    f"the cache has {shape.kv_heads} of {shape.head_dim}, {self.dtype} on {self.device}"
                )

    def attend(
        self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, attention: Attention
    ) -> Tensor:
        """What a layer's queries see, [B, H, T, D]."""
        outs = []
        self._attention[layer] = attention
        for part in self._parts:
            q_BHtD, k_BGtD, v_BGtD = (x[:, :, part.columns] for x in (q_BHTD, k_BGTD, v_BGTD))
            length = q_BHtD.shape[2]
            if part.evicts_prompt and layer in self._queries_BHWD:
                q_BHtD = torch.cat((self._queries_BHWD[layer], q_BHtD), dim=2)
            out_BHtD = part.forward.run_layer(layer, _attend, q_BHtD, k_BGtD, v_BGtD, *attention)
            outs.append(out_BHtD[:, :, -length:])
            if part.active_B is None:
                self._remember(layer, q_BHtD)
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def end(self) -> None:
        """Of the pass, once all layers have attended."""
        for part in self._parts:
            part.forward.finish()
            if part.active_B is None:
                continue
            self.batch.position_B.add_(part.active_B)
            self.turn_step += 1
            self._room -= 1
            if part.evicts_prompt:
                self._compact()
        self._parts = []

    def forget_from(self, positions_B: Tensor) -> None:
        """Drop the tokens at these positions and after them."""
        self.cache.forget_from(positions_B)
        self.batch.position_B.copy_(positions_B)

    def _remember(self, layer: int, q_BHTD: Tensor) -> None:
        """The last queries of a prompt, which score it when it is evicted."""
        if self.config.window == 0:
            return
        if layer in self._queries_BHWD:
            q_BHTD = torch.cat((self._queries_BHWD[layer], q_BHTD), dim=2)
        order_BHWD = self._order_BW[:, None, :, None].expand(-1, q_BHTD.shape[1], -1, q_BHTD.shape[3])
        self._queries_BHWD[layer] = q_BHTD.gather(2, order_BHWD)

    def _forget_queries(self) -> None:
        self._queries_BHWD, self._real_BW = {}, self._real_BW[:, :0]

    def _hold(self, real_BT: Tensor) -> None:
        """Have the tokens of each row, oldest first, in the cache's first slots, and room for these behind
        them."""
        most = int((self.cache.most_B + real_BT.sum(-1)).max())
        tidy = self._reading or int(self.batch.position_B.max()) == 0
        if not tidy or self.cache.shape.slots < most + 1:
            self._move(bucket(most + 1))

    def _chunk_part(self, real_BT: Tensor) -> Part:
        """Tokens that are entered behind the others, and not scored."""
        cache, batch, length = self.cache, self.batch, real_BT.shape[1]
        base_B, offset_BT = cache.most_B, real_BT.cumsum(-1) - 1
        filled = int(base_B.max())
        whole = bool(real_BT.all()) and bool((cache.mean_B == filled).all())
        count_B = real_BT.sum(-1)
        # Padding lands in the last slot, which no prompt fills.
        slots_BT = torch.where(real_BT, base_B[:, None] + offset_BT, cache.shape.slots - 1)
        left_T = torch.arange(length, 0, -1, device=self.device)
        state = ForwardState(
            torch.where(real_BT, batch.position_B[:, None] + offset_BT, EMPTY),
            slots_BT,
            self.rule.backend,
            self.rule.windows,
            # As if no padding came between a token and the last one.
            slots_used=int(torch.where(real_BT, slots_BT + left_T, 0).max()),
            slots_before=filled if whole else None,
        )
        forward = ForwardPass(cache, state)
        for sets in cache.retention:
            sets.free_BX.copy_((base_B + count_B)[:, None])
        batch.position_B.add_(count_B)
        if self.config.window:  # of the last tokens, behind all padding
            real_BW = torch.cat((self._real_BW, real_BT), dim=1)
            self._order_BW = real_BW.int().argsort(dim=-1, stable=True)[:, -self.config.window :]
            self._real_BW = real_BW.gather(1, self._order_BW)
        return Part(forward, slice(0, length))

    def _end_prompt(self) -> None:
        """All of it has been read: set budgets, and evict where that does not wait for the first step."""
        if self._first_turn:
            lengths = self.batch.position_B.tolist()
            budgets = Budgets(self.config, lengths, self.layers)
            self.batch.start(lengths, budgets.protection)
            self.batch.position_B.copy_(self.batch.prompt_B)
            budgets.enter(self.cache.retention)
        self._first_turn = self._reading = False
        if self.config.evict_at == "prompt":
            part = self._evicting_part(self._real_BW[:, :0], slice(0, 0))
            for layer, q_BHWD in self._queries_BHWD.items():
                part.forward.run_layer(layer, _attend, q_BHWD, q_BHWD, q_BHWD, *self._attention[layer])
            self._compact()

    def _evicting_part(self, real_BT: Tensor, columns: slice) -> Part:
        """The new token, if there is one, and the last ones of the prompt, which score it together."""
        cache, batch, new = self.cache, self.batch, real_BT.shape[1] == 1
        batch.finished_B.copy_(~real_BT[:, 0] if new else torch.zeros_like(batch.finished_B))
        real_BT = torch.cat((self._real_BW, real_BT), dim=1)
        state = evicting_state(cache, self.rule, batch, real_BT, new=int(new))
        forward = ForwardPass(cache, state, self.rule.coefficients())
        return Part(forward, columns, state.active_B, evicts_prompt=True)

    def _decode_part(self, real_BT: Tensor) -> Part:
        if self._room < 1:  # or more, if rows have ended since it was measured
            self._measure()
        if self._room < 1:
            self._move(self.cache.slots_for(max(ROOM, self.cache.shape.slots // 8)))
        active_B = real_BT[:, 0]
        scores = self.rule.refreshes_at(self.turn_step + 1)
        state = decode_state(self.rule, self.batch, active_B, scores=scores)
        return Part(ForwardPass(self.cache, state, self.rule.coefficients()), slice(0, 1), active_B)

    def _compact(self) -> None:
        """Evict the prompt to budget, and give back the memory that it took."""
        keep_BXN = chosen(self.cache, self.rule, self.batch)
        set_budgets_after_prompt(self.config, self.cache.retention, keep_BXN)
        self._forget_queries()
        slots = self.cache.slots_for(ROOM, keep_BXN)
        if slots == self.cache.shape.slots:
            self.cache.keep(keep_BXN)
            self._measure()
        else:
            self._move(slots, keep_BXN)

    def _move(self, slots: int, keep_BXN: Sequence[Tensor] | None = None) -> None:
        """Go on in a cache of another size, with all tokens or those marked."""
        shape = replace(self.cache.shape, slots=slots)
        target = SlotCache(shape, dtype=self.dtype, device=self.device, allocate=False)
        target.take_from(self.cache, self.cache.everything() if keep_BXN is None else keep_BXN, release=True)
        self.cache = target
        self._measure()

    def _measure(self) -> None:
        """How many tokens there is room for."""
        slots = self.cache.shape.slots
        largest = int(torch.stack([sets.budget_BX.max() for sets in self.cache.retention]).max())
        self._room = math.inf if largest < slots else slots - 1 - int(self.cache.most_B.max())


def _attend(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    window: int | None,
    scale: float,
    softmax: Softmax | None,
    layer_pass: LayerPass,
) -> Tensor:
    return layer_pass.attend(q_BHTD, k_BGTD, v_BGTD, window=window, scale=scale, softmax=softmax)
