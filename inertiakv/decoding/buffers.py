"""Caches and other buffers: made, kept for the next conversation, checked against available memory."""

from __future__ import annotations

from ..cache import memory
from ..cache.slot_cache import CacheShape, SlotCache, bucket
from ..compiling.collectives import tensor_parallel_of
from ..config import Scope
from ..model import LanguageModel
from .batch import BatchState
from .needs import Needs, Request
from .recording import Recorder

MAX_BATCH_STATES = 16
"""States of batches of different sizes that are kept: those used last."""


class Buffers:
    """Makes caches for a model, and what goes with them. Decode cache, rows and recorder are kept from one
    conversation to the next, at the same address, so that compiled graphs stay valid; a decode cache or a
    recorder of another shape replaces the one before."""

    def __init__(self, model: LanguageModel, recorded_steps: int = 0) -> None:
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.tp = tensor_parallel_of(model)
        self.scope: Scope = "shared"
        self.recorded_steps = recorded_steps
        self.recorder: Recorder | None = None
        self._decode_cache: SlotCache | None = None
        self._batch_states: dict[int, BatchState] = {}

    def shape(self, batch: int, slots: int) -> CacheShape:
        config = self.config
        return CacheShape(config.num_layers, batch, config.num_kv_heads, slots, config.head_dim, self.scope)

    def prompt_cache(self, batch: int, tokens: int) -> SlotCache:
        """A cache for whole prompts, or a further turn, of at most `tokens` tokens a row; its memory is in
        use until it has been evicted."""
        shape = self.shape(batch, bucket(tokens + 1))
        memory.require({"prompt cache": shape.nbytes(self.dtype)}, self.device, self.tp)
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

    def batch_state(self, batch: int) -> BatchState:
        state = self._batch_states.pop(batch, None) or BatchState(batch, self.device)
        self._batch_states[batch] = state  # the latest used is the last one
        if len(self._batch_states) > MAX_BATCH_STATES:
            del self._batch_states[next(iter(self._batch_states))]
        return state

    def recorder_for(self, cache: SlotCache) -> Recorder | None:
        """What steps in this cache are recorded by, None where they are not."""
        if not self.recorded_steps:
            return None
        sizes = (self.recorded_steps, cache.shape.layers, cache.shape.batch, cache.shape.slots)
        if self.recorder is None or self.recorder.sizes != sizes:
            self.recorder = Recorder(*sizes, self.device)
        return self.recorder

    def check_place(self, model: LanguageModel) -> None:
        """Raise ValueError where the model has been moved: graphs and buffers are made for where it was."""
        was, now = (self.dtype, self.device), (model.dtype, model.device)
        if was != now:
            raise ValueError(
                f"the model was {was[0]} on {was[1]} and is {now[0]} on {now[1]}: make a new Decoder"
            )

    def require(self, needs: Needs, request: Request, given_back: int = 0) -> None:
        """Raise MemoryError, with an estimate, where a request does not fit beside what is allocated.
        `given_back`: what the conversation before it holds beside the decode cache."""
        parts, held = dict(needs.parts(request)), given_back
        stays = self.shape(request.batch, request.decode_slots)
        if self._decode_cache is not None:
            held += self._decode_cache.allocated_bytes
            if self._decode_cache.shape == stays and held > given_back:
                parts["decode cache"] = needs.cache(request, request.decode_slots)
        for name in ("decode cache", "prompt cache"):
            used = min(held, parts.get(name, 0))
            if used:
                parts[name] -= used
                held -= used
        memory.require(parts, self.device, self.tp)

    def require_cache(self, name: str, batch: int, slots: int) -> None:
        """Raise MemoryError, with an estimate, where a cache does not fit. A decode cache takes the place of
        the one before it."""
        held = self._decode_cache.allocated_bytes if self._decode_cache and name == "decode cache" else 0
        memory.require(
            {name: max(0, self.shape(batch, slots).nbytes(self.dtype) - held)}, self.device, self.tp
        )
