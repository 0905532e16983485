"""What a request takes of memory, part by part, before it is begun.

Formulas of what the code allocates, each for one stage of a request; the stage that takes most counts. They
are held to what is really taken, for every policy, by compile_tests/decoding/test_needs.py. Left out is what
libraries keep for each thread, some MB, and what a compiler takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..attention.dense import FEW_QUERIES, QUERY_BLOCK
from ..cache.slot_cache import CacheShape
from ..compiling.numerics import accumulation_dtype
from ..config import OF_ATTENTION, EvictionConfig
from ..model import Sizes
from ..scoring.kvzip import CHUNK, LEAD

CHOOSING = 56
"""Bytes for each slot of a set, or each logit that is sampled from, that sorting them takes."""


@dataclass(frozen=True)
class Request:
    """Sizes of a request. `longest`: tokens of the longest row; `tokens`: of all rows that it joins in the
    cache, without those that are decoded; `prompt_slots`: 0 where prompts are read into the decode cache."""

    batch: int
    longest: int
    tokens: int
    even: bool
    chunk: int
    prompt_slots: int
    decode_slots: int
    prefix: int = 0
    """Tokens before each repetition of the scorer `reconstruction`."""
    greedy: bool = True


@dataclass(frozen=True)
class Needs:
    """Of a model's requests under a rule. `on_cpu`: attention goes row by row, and unmasked where it can."""

    sizes: Sizes
    eviction: EvictionConfig | None
    dtype: torch.dtype
    on_cpu: bool = True
    flex: bool = False

    def parts(self, request: Request) -> dict[str, int]:
        """Bytes of each part of the stage that takes most."""
        return max(self.stages(request), key=lambda parts: sum(parts.values()))

    def peak(self, request: Request) -> int:
        return sum(self.parts(request).values())

    def stages(self, r: Request) -> list[dict[str, int]]:
        eviction = self.eviction
        decode, reads = self.cache(r, r.decode_slots), {"prefill": self.prefill(r)}
        logits = {"decode cache": decode, "logits": self.logits(r)}
        if not r.prompt_slots:
            cache = {"decode cache": decode}
            steps = self.first_step(r, 0) if eviction is not None else 0
            return [{**cache, **reads}, {**cache, "first step": steps}, logits]
        assert eviction is not None
        cache = {"prompt cache": self.cache(r, r.prompt_slots)}
        both = {**cache, "decode cache": decode}
        layer = {**cache, "decode cache": decode // self.sizes.num_layers}
        choosing = {"choosing what stays": self.choosing(r)}
        stages = [
            {**cache, **reads},
            {**cache, "logits": self.logits(r)},
            {**cache, "first step": self.first_step(r, 0)},
            {**(both if eviction.draft else cache), **choosing},
            {**layer, "masks": self.masks(r)},
            logits,
        ]
        if eviction.draft:
            stages.append({**both, "first step": self.first_step(r, eviction.draft)})
        if eviction.scorer == "reconstruction":
            stages.append({**cache, "reconstruction": self.reconstruction(r)})
        return stages

    def cache(self, r: Request, slots: int) -> int:
        """K, V and the retention sets."""
        shape = self._shape(r, slots)
        sets = shape.retention_layers * shape.sets * r.batch * slots
        return shape.nbytes(self.dtype) + sets * (4 + self._wide)

    def prefill(self, r: Request) -> int:
        """A chunk of the prompt on its way through the model."""
        masked = not r.even or any(window is not None for window in self.sizes.windows) or not self.on_cpu
        several = r.tokens > min(r.chunk, r.longest)
        return 8 * r.batch * r.longest + self._chunk(r, min(r.chunk, r.longest), masked, several, r.tokens)

    def first_step(self, r: Request, drafted: int) -> int:
        """Queries that score the prompt together, and what a scorer makes of them."""
        eviction, wide = self.eviction, self._wide
        assert eviction is not None
        sizes, slots = self.sizes, r.tokens + 1 + drafted
        queries = eviction.window + (eviction.evict_at == "first_step") + drafted
        rows = 1 if self.on_cpu else r.batch
        # K or V in float32, where they are not.
        copied = 0 if self.dtype.itemsize >= wide else wide * sizes.num_kv_heads * sizes.head_dim * slots
        one = wide * sizes.num_heads * queries * slots
        sets = self._shape(r, slots).sets
        taken = 0
        if queries == 1:
            taken = rows * (copied + 3 * one) + (2 * r.batch * one if r.batch > rows else 0)
        elif queries:
            taken = self._chunk(r, queries, True, True, slots)
            if eviction.scorer == "expected_attention":  # queries turned back and forth, beside their output
                q, kv = (n * sizes.head_dim for n in (sizes.num_heads, sizes.num_kv_heads))
                size = self.dtype.itemsize
                each = size * (3 * sizes.hidden_size + 2 * kv + 2 * q) + 7 * wide * q // 2
                taken = max(taken, r.batch * queries * each)
            if eviction.scorer in OF_ATTENTION:
                seen = r.batch * sets * queries * slots
                # Of all rows where there are several, and of one, its logits or K beside them.
                weights = one + max(one, copied) + (r.batch * one if r.batch > 1 else 0)
                taken = weights + 2 * seen + self._chunk(r, queries, False, False, slots)
                if eviction.window_by == "max":
                    taken += wide * seen
        return max(taken, self._scores(r, queries, slots))

    def _scores(self, r: Request, queries: int, slots: int) -> int:
        """What a scorer takes, beside attention weights."""
        eviction, wide, sizes = self.eviction, self._wide, self.sizes
        assert eviction is not None
        keys = wide * r.batch * sizes.num_kv_heads * sizes.head_dim * slots
        copied = keys if self.dtype.itemsize < wide else 0
        weights = wide * r.batch * sizes.num_heads * queries * slots
        if eviction.scorer in ("entropy", "above_mean"):
            return 3 * weights
        if eviction.scorer == "value_norm":
            return weights + keys + copied
        each = 6 * wide * r.batch * sizes.num_kv_heads * slots
        if eviction.scorer in ("keydiff", "expected_attention"):
            return 2 * keys + copied + each
        if eviction.scorer in ("key_norm", "learned"):
            return keys + copied + each
        return 0

    def reconstruction(self, r: Request) -> int:
        """A chunk of the prompt that is read again, behind the prompt."""
        sizes, size = self.sizes, self.dtype.itemsize
        queries = min(CHUNK, r.longest) + min(LEAD, max(0, r.longest - CHUNK)) + r.prefix
        behind = 2 * size * r.batch * sizes.num_kv_heads * sizes.head_dim * (r.tokens + queries)
        masked = not r.even or not self.on_cpu
        read = behind + self._chunk(r, queries, masked, True, r.tokens + queries)
        keys = min(CHUNK, r.longest) + queries
        q, kv = (n * sizes.head_dim for n in (sizes.num_heads, sizes.num_kv_heads))
        scored = 2 * self._wide * sizes.num_heads * FEW_QUERIES * keys
        scored += (size * r.batch + self._wide) * kv * keys + self._wide * q * queries
        return max(read, scored + r.batch * queries * size * (3 * sizes.hidden_size + 2 * kv + q))

    def choosing(self, r: Request) -> int:
        """Utilities pooled and sorted, of one layer or of all together."""
        assert self.eviction is not None
        shape = self._shape(r, r.prompt_slots)
        one = shape.sets * r.batch * shape.slots
        layers = shape.retention_layers
        together = layers if self.eviction.allocation == "model" else 1
        return CHOOSING * one * together + one * layers * (6 if self.eviction.pool else 2)

    def masks(self, r: Request) -> int:
        """What stays of each set, and in which slots it is."""
        shape = self._shape(r, r.prompt_slots)
        sets = shape.retention_layers * shape.sets * r.batch
        return sets * (shape.slots + 8 * r.decode_slots) + 16 * shape.sets * r.batch * shape.slots

    def logits(self, r: Request) -> int:
        """Logits of the rows' next token, and what choosing from them takes."""
        size = self.dtype.itemsize
        each = size + (self._wide if size < self._wide else 0) + (0 if r.greedy else CHOOSING)
        return r.batch * self.sizes.vocab_size * each

    def _chunk(self, r: Request, queries: int, masked: bool, several: bool, slots: int) -> int:
        """Queries on their way through a layer: attention or MLP, whatever takes more. `several`: they attend
        to older tokens, too."""
        sizes, size, wide = self.sizes, self.dtype.itemsize, self._wide
        q, kv, x = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim, sizes.hidden_size
        casts = 0 if size >= wide else 2 * wide
        rotated = 2 * size + 2 * wide + (0 if size >= wide else wide)
        attended, mask = 2 * size, 0
        if masked and not self.flex:
            attended = 3 * size
            mask = (
                r.batch * min(QUERY_BLOCK, queries) * slots * (1 + max(2, size))
                - 2 * size * r.batch * queries * q
            )
        elif several and not self.flex:
            attended = 2 * size + wide + casts
        attention = size * (3 * x + 2 * kv) + q * max(rotated, size + attended) + 3 * 4 * sizes.num_heads
        mlp = 4 * size * x + max(self._mlp_bytes(), 2 * wide * x)
        around = wide * sizes.head_dim + 64
        return r.batch * queries * (max(attention, mlp) + around) + max(0, mask)

    def _mlp_bytes(self) -> int:
        """Of a token: a gated MLP, unless the model's config says otherwise."""
        own = getattr(self.sizes, "mlp_bytes", None)
        return own(self.dtype) if own is not None else 3 * self.dtype.itemsize * self.sizes.intermediate_size

    def _shape(self, r: Request, slots: int) -> CacheShape:
        sizes, scope = self.sizes, "shared" if self.eviction is None else self.eviction.scope
        return CacheShape(sizes.num_layers, r.batch, sizes.num_kv_heads, slots, sizes.head_dim, scope)

    @property
    def _wide(self) -> int:
        return accumulation_dtype(self.dtype).itemsize
