"""KVzip's scores: the attention that the model pays while it repeats the prompt (arXiv 2505.23416).

The prompt is fed again behind itself, chunk by chunk. A token's score is the maximum attention that any
query of its chunk's repetition pays to it. These queries attend over the whole prompt and one another; the
softmax of the score is over the chunk, the sinks and the queries only. Nothing of a repetition is cached.

This costs three or four prefills on a CPU: every token goes through the model again, attends over the whole
prompt, and its chunk's attention is computed a second time for the weights. Positions go on behind the
prompt, by a chunk at most.

Shape letters: B batch, T query tokens, H query heads, G KV heads, X retention sets, N slots, C prompt tokens
of a chunk, S sinks, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.dense import dense_chunk, most_attention
from ..cache.retention import EMPTY
from ..cache.slot_cache import SlotCache
from ..model import LanguageModel
from .aggregation import Coefficients, updated
from .scorers import by_set

CHUNK = 2048
"""Tokens of the prompt that are repeated at a time."""
LEAD = 8
"""Tokens before a chunk that its repetition begins with: they say where to start."""


def reconstruct(
    model: LanguageModel,
    cache: SlotCache,
    position_B: Tensor,
    coefficients: dict[int, Coefficients],
    tokens: list[list[int]],
    *,
    prefix: Sequence[int],
    sinks: int,
) -> None:
    """Score the tokens that have just been entered into the cache: sets their utilities, in place.

    `prefix`: token ids before every repetition, an instruction say. `sinks`: positions that are not evicted.
    """
    filled = cache.filled
    even = all(bool((sets.count_BX == filled).all()) for sets in cache.retention)
    length_B = torch.tensor([len(row) for row in tokens], device=cache.device)
    for start in range(0, int(length_B.max()), CHUNK):
        chunks = [row[start : start + CHUNK] for row in tokens]
        leads = [row[max(0, start - LEAD) : start] for row in tokens]
        repeated = [
            [*prefix, *lead, *chunk] if chunk else [] for lead, chunk in zip(leads, chunks, strict=True)
        ]
        token_BT, offset_T = _padded(repeated, cache.device)
        chunk_BC, offset_C = _padded(chunks, cache.device)
        slot_BC = (cache.retention[0].free_BX[:, 0] - length_B + start)[:, None] + offset_C
        repetition = Repetition(
            cache,
            coefficients,
            torch.where(token_BT >= 0, position_B[:, None] + offset_T, EMPTY),
            torch.where(chunk_BC >= 0, slot_BC, filled),
            position_B - length_B + start,
            min(sinks, filled),
            filled,
            even,
        )
        model(token_BT.clamp_min(0), repetition.positions_BT, repetition)


def _padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows as one tensor, filled up with -1, and the index along it."""
    longest = max(map(len, rows))
    padded = torch.tensor([row + [-1] * (longest - len(row)) for row in rows], device=device)
    return padded, torch.arange(longest, device=device)


@dataclass
class Repetition:
    """A chunk of each row's prompt, and the queries that repeat it: what a model runs its layers with, and
    these attend through."""

    cache: SlotCache
    coefficients: dict[int, Coefficients]
    """Of the layers that score."""
    positions_BT: Tensor
    """Of the queries, -1 for padding."""
    slot_BC: Tensor
    """Where the chunk's tokens are, the same in every set; `filled` for padding."""
    first_B: Tensor
    """Position of the chunk's first token."""
    sinks: int
    """First positions, in the first slots, that the softmax takes in beside the chunk."""
    filled: int
    """No slot from here on holds a token."""
    even: bool
    """All slots before it do, in every set."""
    layer: int = 0
    """The one that runs."""

    def run_layer(self, index: int, layer: Callable[..., Tensor], x_BTE: Tensor, *args: Any) -> Tensor:
        self.layer = index
        return layer(x_BTE, *args, self)

    def attend(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int | None, scale: float
    ) -> Tensor:
        """Attend over the prompt and the queries' own tokens, [B, H, T, D], and score the chunk."""
        kv, sets = self.cache.layers[self.layer], self.cache.sets_of(self.layer)
        position_BXN = sets.position_BXN[..., : self.filled]
        own_BXT = self.positions_BT[:, None].expand(-1, position_BXN.shape[1], -1)
        if self.layer in self.coefficients:
            self._score(q_BHTD, kv.k_BGND, k_BGTD, own_BXT, window, scale)
        k_BGND, v_BGND = (
            torch.cat((old[:, :, : self.filled], new), dim=2)
            for old, new in ((kv.k_BGND, k_BGTD), (kv.v_BGND, v_BGTD))
        )
        seen = (torch.cat((position_BXN, own_BXT), dim=-1), self.positions_BT, window)
        ends = (k_BGND.shape[2], self.filled if self.even else None)
        return dense_chunk(q_BHTD, k_BGND, v_BGND, *seen, scale, *ends)

    def _score(
        self,
        q_BHTD: Tensor,
        k_BGND: Tensor,
        k_BGTD: Tensor,
        own_BXT: Tensor,
        window: int | None,
        scale: float,
    ) -> None:
        sets = self.cache.sets_of(self.layer)
        keys = self._keys(k_BGND, k_BGTD, sets.position_BXN[..., : self.filled], own_BXT)
        most_BGK = most_attention(q_BHTD, *keys, self.positions_BT, window, scale)
        score_BGC = most_BGK[..., self.sinks : -k_BGTD.shape[2]]
        self._update(sets.utility_BXN[..., : self.filled], score_BGC)

    def _keys(
        self, k_BGND: Tensor, k_BGTD: Tensor, position_BXN: Tensor, own_BXT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The keys of the score's softmax (S sinks, C tokens of the chunk, T queries) and their positions,
        `EMPTY` for padding."""
        sinks_BXS = position_BXN[..., : self.sinks]
        before_B11 = self.first_B.clamp_max(self.sinks)[:, None, None]
        sinks_BXS = torch.where(sinks_BXS < before_B11, sinks_BXS, EMPTY)
        slot_BC = self.slot_BC.clamp_max(self.filled - 1)
        chunk_BXC = position_BXN.gather(-1, slot_BC[:, None].expand(-1, position_BXN.shape[1], -1))
        chunk_BXC = torch.where(self.slot_BC[:, None] < self.filled, chunk_BXC, EMPTY)
        at_BGCD = slot_BC[:, None, :, None].expand(-1, k_BGTD.shape[1], -1, k_BGTD.shape[3])
        keys = torch.cat((k_BGND[:, :, : self.sinks], k_BGND.gather(2, at_BGCD), k_BGTD), dim=2)
        return keys, torch.cat((sinks_BXS, chunk_BXC, own_BXT), dim=-1)

    def _update(self, utility_BXN: Tensor, score_BGC: Tensor) -> None:
        # One slot more, for padding.
        slot_BGC = self.slot_BC[:, None].expand_as(score_BGC)
        score_BGN = score_BGC.new_zeros(*score_BGC.shape[:2], self.filled + 1).scatter(
            -1, slot_BGC, score_BGC
        )
        scored_BN = torch.zeros_like(score_BGN[:, 0], dtype=torch.bool).scatter(-1, self.slot_BC, True)
        score_BXN = by_set(score_BGN[..., :-1].to(utility_BXN.dtype), utility_BXN.shape[1])
        smoothing = self.coefficients[self.layer].smoothing
        utility_BXN.copy_(updated(utility_BXN, score_BXN, scored_BN[:, None, :-1], smoothing))
