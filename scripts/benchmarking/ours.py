"""inertiakv's decoder as a contender, driven as anyone would drive it."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from inertiakv import Decoder, EvictionConfig
from inertiakv.cache.slot_cache import SlotCache
from inertiakv.models import Transformer

from .contender import CacheUse, Case, Kinds, Start
from .machine import synchronize


class Ours:
    """A named policy. A step's time is what `Decoder.decode` takes, with its bookkeeping on the host; on
    several ranks what it takes on the slowest of them, so that all count as many steps."""

    def __init__(self, name: str, eviction: EvictionConfig | None, case: Case) -> None:
        self.name, self.eviction, self.case = name, eviction, case
        refresh = "once" if eviction is None else eviction.refresh
        self.period = 1 if refresh == "once" else refresh
        self.refresh_share = 0.0 if refresh == "once" else 1 / refresh
        self.device = case.model.device
        self.kinds = Kinds()
        self._step = 0

    def start(self) -> Start:
        """Raises MemoryError where not even the evicted cache fits."""
        how = "prefill" if not self.case.skip_prefill else "synthetic prompt"
        try:
            self.decoder, first_token = self._begin(self.eviction, self.case.prompts())
        except MemoryError:
            if not self.case.skip_prefill or self.eviction is None:
                raise
            # Rows that hold what their budgets keep of the prompt, as if they had been prefilled one by one.
            kept = [tokens[: self.eviction.budget_for(len(tokens))] for tokens in self.case.prompts()]
            evicted = dataclasses.replace(self.eviction, budget=None, compression=0.0)
            how, (self.decoder, first_token) = "evicted cache", self._begin(evicted, kept)
        first_step = self.decoder.stats.seconds.first_step
        self._step = self.decoder.stats.refreshes  # the step that evicts is the schedule's first
        evicted_prompt = first_step and how != "evicted cache"
        return Start(
            how,
            None if self.case.skip_prefill else 1000 * first_token,
            1000 * first_step if evicted_prompt else None,
        )

    def _begin(self, eviction: EvictionConfig | None, prompts: list[list[int]]) -> tuple[Decoder, float]:
        """A decoder with its prompts taken in, one token answered, evicted; and that token's seconds, without
        those of compiling."""
        decoder = Decoder(
            self.case.model, eviction, compile=self.case.compiled, attention=self.case.attention
        )
        if self.case.skip_prefill:
            fill_instead_of_prefill(decoder)
        synchronize(self.device)
        begin = time.perf_counter()
        with contextlib.closing(
            decoder.stream(prompts, self.case.new_tokens, eos_token_ids=())  # type: ignore[type-var]
        ) as stream:
            next(stream)
            seconds = time.perf_counter() - begin - decoder.stats.seconds.compile
        return decoder, seconds

    def steps(self, count: int) -> list[float]:
        if self.device.type == "cuda":  # reading every token would stop the device at every step
            synchronize(self.device)
            begin = time.perf_counter()
            self.decoder.decode(count, eos_token_ids=())
            synchronize(self.device)
            self._step += count
            return slowest([1000 * (time.perf_counter() - begin) / count], self.case.model)
        stamps = [time.perf_counter()]

        def stamp(row: int, tokens: list[int]) -> bool:
            if row == 0:
                stamps.append(time.perf_counter())
            return False

        self.decoder.decode(count, eos_token_ids=(), stop=stamp)
        times = slowest([1000 * (after - before) for before, after in pairwise(stamps)], self.case.model)
        for milliseconds in times:
            self._step += 1
            refreshed = self.eviction is not None and self.eviction.refreshes_at(self._step)
            (self.kinds.refresh if refreshed else self.kinds.plain).append(milliseconds)
        return times

    def settled(self) -> None:
        self.kinds = Kinds()

    def cache(self) -> CacheUse:
        return CacheUse(self.decoder.stats.kept_tokens, self.decoder.stats.cache_bytes)

    @property
    def extra(self) -> dict[str, Any]:
        stats, kinds = self.decoder.stats, self.kinds
        mixed = bool(kinds.refresh and kinds.plain)
        return {
            "config": None if self.eviction is None else dataclasses.asdict(self.eviction),
            "attention": self.decoder.method.backend,
            "ms_by_kind": {kind: statistics.median(ms) for kind, ms in vars(kinds).items()}
            if mixed
            else None,
            "graphs": stats.graphs.counts(),
        }


def slowest(times: list[float], model: Transformer) -> list[float]:
    """Of each time the longest that any rank of the model has."""
    if model.tp.size == 1:
        return times
    own = torch.tensor(times, dtype=torch.float64, device=model.device)
    return model.tp.gather(own).unflatten(0, (model.tp.size, -1)).amax(0).tolist()


def fill_instead_of_prefill(decoder: Decoder) -> None:
    """Make a decoder enter prompts into its cache as random K and V, which takes no time at any length."""

    class Filling:
        chunk = 1

        @staticmethod
        def enter(
            cache: SlotCache, rows: list[list[int]], slots: list[int], positions: list[int], _progress: object
        ) -> Tensor:
            for row, tokens in enumerate(rows):
                end = slots[row] + len(tokens)
                of_row = torch.arange(positions[row], positions[row] + len(tokens), device=cache.device)
                for table in cache.retention:
                    table.position_BXN[row, :, slots[row] : end] = of_row
                    table.free_BX[row] = end
                first = cache.layers[0]
                for layer in cache.layers:
                    for name in ("k_BGND", "v_BGND"):
                        target = getattr(layer, name)[row, :, slots[row] : end]
                        if layer is first:
                            target.normal_()
                        else:
                            target.copy_(getattr(first, name)[row, :, slots[row] : end])
            hidden = decoder.model.config.hidden_size
            return torch.randn(len(rows), hidden, dtype=cache.dtype, device=cache.device)

    decoder._engine.prefill = Filling()  # type: ignore[assignment]
