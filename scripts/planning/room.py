"""What requests take on a rank, and how many fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from inertiakv import EvictionConfig
from inertiakv.cache.budgets import Budgets
from inertiakv.cache.slot_cache import CacheShape, SlotCache, bucket
from inertiakv.decoding.buffers import prefill_bytes
from inertiakv.models import ModelConfig

from .rank import Rank


@dataclass(frozen=True)
class Request:
    """One row: so many tokens of a prompt, so many of an answer, under a rule (None keeps everything)."""

    context: int
    new_tokens: int
    eviction: EvictionConfig | None

    @property
    def draft(self) -> int:
        """Tokens of a draft of the answer."""
        return 0 if self.eviction is None else self.eviction.draft

    @property
    def refresh_share(self) -> float:
        """Of the decode steps, how many score."""
        if self.eviction is None:
            return 0.0
        refreshes = sum(self.eviction.refreshes_at(step) for step in range(2, self.new_tokens + 2))
        return refreshes / self.new_tokens


@dataclass(frozen=True)
class Room:
    """Bytes that a row takes on a rank, beside the weights. All rows are alike, so rows just add up."""

    weights: int
    prompt: int
    """The cache that its prompt is read into; 0 where that is the decode cache."""
    decode: int
    decode_kv: int
    """K and V alone, without the tables of what is retained."""
    workspace: int
    """While a chunk of its prompt is read."""
    kept: int
    """Tokens that a step sees, halfway through the answer."""
    slots: int

    def together(self, rows: int) -> int:
        """With rows whose prompts are read at once, as one call of a decoder does."""
        return self.weights + rows * (self.prompt + self.decode + self.workspace)

    def one_by_one(self, rows: int) -> int:
        """With rows that come one after the other: the last one's prompt is read while the others wait in
        their decode caches."""
        return self.weights + rows * self.decode + min(rows, 1) * (self.prompt + self.workspace)

    def most_together(self, memory: float) -> int:
        return max(0, math.floor(memory - self.weights) // (self.prompt + self.decode + self.workspace))

    def most_one_by_one(self, memory: float) -> int:
        return max(0, math.floor(memory - self.one_by_one(1)) // self.decode + 1)


def room_for(rank: Rank, request: Request, chunk: int) -> Room:
    """Raises ValueError for a budget that cannot be."""
    config, dtype, eviction = rank.config, rank.model.dtype, request.eviction
    budgets = Budgets(eviction, [request.context], config.num_layers)
    grows = eviction is not None and eviction.after == "none"
    halfway = request.new_tokens // 2
    decode = _shape(config, eviction, budgets.decode_slots(max(request.new_tokens, request.draft)))
    prompt = _shape(config, eviction, bucket(request.context + request.draft + 1))
    return Room(
        weights=rank.weights,
        prompt=_bytes(prompt, dtype) if budgets.overfull else 0,
        decode=_bytes(decode, dtype),
        decode_kv=decode.nbytes(dtype),
        workspace=prefill_bytes(config, 1, min(chunk, request.context), dtype),
        kept=min(budgets.rows[0] + grows * halfway, request.context + halfway),
        slots=decode.slots,
    )


def _shape(config: ModelConfig, eviction: EvictionConfig | None, slots: int) -> CacheShape:
    """Of one row's cache."""
    scope = "shared" if eviction is None else eviction.scope
    return CacheShape(config.num_layers, 1, config.num_kv_heads, slots, config.head_dim, scope)


def _bytes(shape: CacheShape, dtype: torch.dtype) -> int:
    """Of K, V and tables."""
    return sum(buffer.nbytes for buffer in SlotCache(shape, dtype=dtype, device="meta").buffers())
