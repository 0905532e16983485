"""Which caches exist, how large they are, and whether they fit: the decode cache that stays, and large ones
that go."""

from __future__ import annotations

from . import memory
from .cache import CacheShape, SlotCache, bucket
from .config import Scope
from .protocol import LanguageModel


class Buffers:
    """Makes caches for a model. The decode cache is kept from one conversation to the next, at the same
    address, so that compiled graphs stay valid; one of another shape replaces it."""

    def __init__(self, model: LanguageModel, scope: Scope) -> None:
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.scope: Scope = scope
        self._decode_cache: SlotCache | None = None

    def shape(self, batch: int, slots: int) -> CacheShape:
        config = self.config
        return CacheShape(config.num_layers, batch, config.num_kv_heads, slots, config.head_dim, self.scope)

    def prompt_cache(self, batch: int, tokens: int) -> SlotCache:
        """A cache for whole prompts, or a further turn, of at most `tokens` tokens a row; its memory is in
        use until it has been evicted."""
        shape = self.shape(batch, bucket(tokens + 1))
        memory.require({"prompt cache": shape.nbytes(self.dtype)}, self.device)
        return SlotCache(shape, dtype=self.dtype, device=self.device)

    def decode_cache(self, batch: int, slots: int) -> SlotCache:
        """The cache to decode in. It takes memory when it is filled for the first time."""
        shape = self.shape(batch, slots)
        if self._decode_cache is None or self._decode_cache.shape != shape:
            self._decode_cache = None  # gives its memory back before the next one is made
            self._decode_cache = SlotCache(shape, dtype=self.dtype, device=self.device, allocate=False)
        return self._decode_cache

    def is_decode_cache(self, cache: SlotCache) -> bool:
        return cache is self._decode_cache

    def require(self, batch: int, prompt_slots: int, decode_slots: int, chunk: int) -> None:
        """Raise MemoryError, with an estimate, where a request does not fit beside what is allocated."""
        held = 0 if self._decode_cache is None else self._decode_cache.allocated_bytes
        width = max(
            self.config.hidden_size,
            self.config.intermediate_size,
            self.config.num_heads * self.config.head_dim,
        )
        parts = {
            "prompt cache": self.shape(batch, prompt_slots).nbytes(self.dtype) if prompt_slots else 0,
            "decode cache": max(0, self.shape(batch, decode_slots).nbytes(self.dtype) - held),
            "prefill": 6 * batch * chunk * width * max(4, self.dtype.itemsize),
        }
        memory.require(parts, self.device)
