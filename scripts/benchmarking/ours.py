"""inertiakv's decoder as a contender, used as anyone would use it."""

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

from .machine import synchronize
from .measure import Case, Contender, warm_up_steps


def refresh_period(eviction: EvictionConfig | None) -> int:
    """Decode steps from one refresh to the next; 1 for a policy without refreshes."""
    return 1 if eviction is None or eviction.refresh == "once" else eviction.refresh


class Ours(Contender):
    """A named policy. A step's time is that of `Decoder.decode`, including its bookkeeping on the host. With
    several ranks it is the slowest rank's, so that all of them run the same number of steps."""

    def __init__(self, name: str, case: Case, eviction: EvictionConfig | None) -> None:
        super().__init__(name, case)
        self.eviction = eviction
        self.period = refresh_period(eviction)
        self.refresh_share = 1 / self.period if eviction is not None and eviction.refreshes else 0.0
        self.step_ms: list[float] = []
        """Of every step since `start`, on a CPU."""

    def start(self) -> None:
        """Raises MemoryError if not even the evicted cache fits."""
        prompts, skipped = self.case.prompts(), self.case.skip_prefill
        self.how = "synthetic prompt" if skipped else "prefill"
        try:
            self.decoder, first_token = self._begin(self.eviction, prompts)
        except MemoryError:
            if not skipped or self.eviction is None:
                raise
            # Start from what is left of the prompts after evicting, as if each row had been prefilled alone.
            kept = [tokens[: self.eviction.budget_for(len(tokens))] for tokens in prompts]
            evicted = dataclasses.replace(self.eviction, budget=None, compression=0.0)
            self.how, (self.decoder, first_token) = "evicted cache", self._begin(evicted, kept)
        first_step = self.decoder.stats.seconds.first_step
        self.first_token_ms = None if skipped else 1000 * first_token
        self.first_step_ms = 1000 * first_step if first_step and self.how != "evicted cache" else None

    def _begin(self, eviction: EvictionConfig | None, prompts: list[list[int]]) -> tuple[Decoder, float]:
        """A decoder that has generated one token and evicted, and the seconds this took without compiling."""
        decoder = Decoder(self.case.model, eviction, compile=self.case.compile, attention=self.case.attention)
        if self.case.skip_prefill:
            fill_instead_of_prefill(decoder)
        synchronize(self.device)
        begin = time.perf_counter()
        with contextlib.closing(
            decoder.stream(prompts, self.case.new_tokens, eos_token_ids=())  # type: ignore[type-var]
        ) as stream:
            next(stream)
            seconds = time.perf_counter() - begin - decoder.stats.seconds.compile
        self._schedule_start = decoder.stats.refreshes  # the step that evicts is the first of the schedule
        return decoder, seconds

    def steps(self, count: int) -> list[float]:
        if self.device.type == "cuda":  # waiting for every token would slow down every step
            synchronize(self.device)
            begin = time.perf_counter()
            self.decoder.decode(count, eos_token_ids=())
            synchronize(self.device)
            return self._slowest([1000 * (time.perf_counter() - begin) / count])
        stamps = [time.perf_counter()]

        def stamp(row: int, tokens: list[int]) -> bool:
            if row == 0:
                stamps.append(time.perf_counter())
            return False

        self.decoder.decode(count, eos_token_ids=(), stop=stamp)
        times = self._slowest([1000 * (after - before) for before, after in pairwise(stamps)])
        self.step_ms += times
        return times

    def _slowest(self, times: list[float]) -> list[float]:
        """The longest of each time on any rank of the model."""
        tp = self.case.model.tp
        if tp.size == 1:
            return times
        own = torch.tensor(times, dtype=torch.float64, device=self.device)
        return tp.gather(own).unflatten(0, (tp.size, -1)).amax(0).tolist()

    def kept(self) -> list[int]:
        return [round(kept) for kept in self.decoder.stats.kept_tokens]

    def cache_bytes(self) -> int:
        return self.decoder.stats.cache_bytes

    def extra(self) -> dict[str, Any]:
        return {
            "config": None if self.eviction is None else dataclasses.asdict(self.eviction),
            "attention": self.decoder.rule.backend,
            "ms_by_kind": self._ms_by_kind(),
            "graphs": self.decoder.stats.graphs.counts(),
        }

    def _ms_by_kind(self) -> dict[str, float] | None:
        """Median time of the steps that score and of those that do not, if there are both."""
        kinds: dict[str, list[float]] = {"refresh": [], "plain": []}
        warm_up = warm_up_steps(self.period)
        for step, ms in enumerate(self.step_ms[warm_up:], self._schedule_start + warm_up + 1):
            refreshes = self.eviction is not None and self.eviction.refreshes_at(step)
            kinds["refresh" if refreshes else "plain"].append(ms)
        return {kind: statistics.median(ms) for kind, ms in kinds.items()} if all(kinds.values()) else None


def fill_instead_of_prefill(decoder: Decoder) -> None:
    """Let a decoder enter prompts into its cache as random K and V, which is fast at any length."""

    class Filling:
        chunk = 1

        @staticmethod
        def read(
            cache: SlotCache, rows: list[list[int]], slots: list[int], positions: list[int], _progress: object
        ) -> Tensor:
            first = cache.layers[0]
            for row, tokens in enumerate(rows):
                begin, end = slots[row], slots[row] + len(tokens)
                row_positions = torch.arange(
                    positions[row], positions[row] + len(tokens), device=cache.device
                )
                for sets in cache.retention:
                    sets.position_BXN[row, :, begin:end] = row_positions
                    sets.free_BX[row] = end
                for name in ("k_BGND", "v_BGND"):
                    source = getattr(first, name)[row, :, begin:end].normal_()
                    for layer in cache.layers[1:]:
                        getattr(layer, name)[row, :, begin:end].copy_(source)
            hidden = decoder.model.config.hidden_size
            return torch.randn(len(rows), hidden, dtype=cache.dtype, device=cache.device)

    decoder._runtime.prefill = Filling()  # type: ignore[assignment]
