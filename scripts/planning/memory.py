"""What a model and its requests take of a rank's memory, by the decoder's own formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from inertiakv import EvictionConfig
from inertiakv.cache.budgets import Budgets
from inertiakv.cache.slot_cache import CacheShape, SlotCache, bucket
from inertiakv.compiling.collectives import TensorParallel
from inertiakv.decoding.needs import Needs, Request
from inertiakv.models import ModelConfig, Transformer
from inertiakv.models.quantize import make_room
from inertiakv.scripts.benchmarking import traffic

CHUNK = 2048
"""Tokens of a prompt that are read at a time, as by a decoder unless told otherwise."""


@dataclass(frozen=True)
class Shard:
    """A model as one tensor-parallel rank holds it, on the meta device."""

    model: Transformer
    ranks: int
    parameters: int
    active_weights: int
    """Weights that a token is multiplied with."""

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())


def make_shard(config: ModelConfig, dtype: torch.dtype, quantize: str | None, ranks: int) -> Shard:
    """What the first rank holds. Raises ValueError for what cannot be split or quantised."""
    with torch.device("meta"):
        model = Transformer(config, TensorParallel(size=ranks)).to(dtype)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        active = traffic.active_weights(model)
        if quantize is not None:
            make_room(model)
    return Shard(model, ranks, parameters, active)


@dataclass(frozen=True)
class Footprint:
    """Bytes on a rank, of the weights and of each row. All rows of a batch are alike."""

    shard: Shard
    context: int
    """Tokens of a row's prompt."""
    draft: int
    """Tokens of a draft of the answer; 0 for a rule without."""
    drafts: int
    refresh_share: float
    """Share of the decode steps that score."""
    weights: int
    prompt_cache: int
    """The cache that the prompt is read into; 0 where that is the decode cache."""
    decode_cache: int
    decode_kv: int
    """K and V of the decode cache alone, without the retention sets."""
    workspace: int
    """What a request takes beside these caches at its peak, while a prompt is read or scored."""
    kept: int
    """Tokens that a step sees, halfway through the answer."""
    slots: int

    def together(self, rows: int) -> int:
        """Bytes where all prompts are read at once, as in one call of a decoder."""
        return self.weights + rows * self._row

    def one_by_one(self, rows: int) -> int:
        """Bytes where one prompt is read at a time, while the other rows wait in their decode caches."""
        return self.weights + rows * self.decode_cache + min(rows, 1) * (self.prompt_cache + self.workspace)

    def most_together(self, available: float) -> int:
        return max(0, math.floor(available - self.weights) // self._row)

    def most_one_by_one(self, available: float) -> int:
        return max(0, math.floor(available - self.one_by_one(1)) // self.decode_cache + 1)

    @property
    def _row(self) -> int:
        return self.prompt_cache + self.decode_cache + self.workspace


def make_footprint(
    shard: Shard,
    context: int,
    new_tokens: int,
    eviction: EvictionConfig | None,
    *,
    chunk: int = CHUNK,
    on_cpu: bool = False,
) -> Footprint:
    """Of rows with such prompts and answers, and a rule (None keeps everything). Raises ValueError for a
    budget that cannot be."""
    config, dtype = shard.config, shard.model.dtype
    budgets = Budgets(eviction, [context], config.num_layers)
    halfway = new_tokens // 2
    grown = halfway if eviction is not None and eviction.after == "none" else 0
    draft, drafts, refreshes = 0, 0, 0
    if eviction is not None:
        draft, drafts = eviction.draft, eviction.drafts
        refreshes = sum(eviction.refreshes_at(step) for step in range(2, new_tokens + 2))

    def cache(slots: int) -> CacheShape:
        scope = "shared" if eviction is None else eviction.scope
        return CacheShape(config.num_layers, 1, config.num_kv_heads, slots, config.head_dim, scope)

    def allocated(shape: CacheShape) -> int:
        if not shape.slots:
            return 0
        return sum(buffer.nbytes for buffer in SlotCache(shape, dtype=dtype, device="meta").buffers())

    decode = cache(budgets.decode_slots(max(new_tokens, draft)))
    prompt = cache(bucket(context + draft + 1) if budgets.overfull else 0)
    request = Request(1, context, context, True, chunk, prompt.slots, decode.slots)
    peak = Needs(config, eviction, dtype, on_cpu=on_cpu, flex=not on_cpu).peak(request)
    return Footprint(
        shard,
        context,
        draft,
        drafts,
        refreshes / new_tokens,
        weights=shard.weight_bytes,
        prompt_cache=allocated(prompt),
        decode_cache=allocated(decode),
        decode_kv=decode.nbytes(dtype),
        workspace=max(0, peak - allocated(prompt) - allocated(decode)),
        kept=min(budgets.rows[0] + grown, context + halfway),
        slots=decode.slots,
    )
