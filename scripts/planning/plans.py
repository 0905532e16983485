"""Everything that is said of a model on a device: as plain values, for JSON, tables and the chart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inertiakv import EvictionConfig, policy
from inertiakv.models import ModelConfig
from inertiakv.scripts.benchmarking import traffic

from .devices import Device
from .rank import Rank, rank_of
from .room import Request, Room, room_for
from .speed import Link, Shares, rehearsal, step

FULL = "full"
COMPRESSIONS = (0.0, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99)


@dataclass(frozen=True)
class Plan:
    """What is asked: every number of ranks with every context, batch and rule."""

    name: str
    config: ModelConfig
    dtype: torch.dtype
    quantize: str | None
    device: Device
    shares: Shares
    link: Link | None
    usable: float
    """Of the memory, what may be filled."""
    rules: dict[str, EvictionConfig | None]
    ranks: Sequence[int]
    contexts: Sequence[int]
    batches: Sequence[int]
    new_tokens: int
    chunk: int

    @property
    def available(self) -> float:
        return self.usable * self.device.memory

    def as_json(self) -> dict[str, Any]:
        """Raises ValueError for what cannot be split, or evicted to its budget."""
        ranks = {number: rank_of(self.config, self.dtype, self.quantize, number) for number in self.ranks}
        whole = rank_of(self.config, self.dtype, self.quantize, 1)
        return {
            "model": {
                "name": self.name,
                "dtype": str(self.dtype).removeprefix("torch."),
                "quantize": self.quantize,
                "parameters": whole.parameters,
                "weight_bytes": whole.weights,
                "kv_bytes_per_token": traffic.kv_bytes(self.config, [1], self.dtype),
            },
            "device": {
                "name": self.device.name,
                "memory_bytes": round(self.device.memory),
                "usable": self.usable,
                "bytes_per_second": round(self.device.bandwidth),
                "flops_per_second": self.device.flops.get(self.dtype.itemsize),
                "interconnect_bytes_per_second": self.link and self.link.bandwidth,
            },
            "shares": vars(self.shares),
            "rooms": [
                self._room(ranks[number], context, name)
                for number, context, name in itertools.product(self.ranks, self.contexts, self.rules)
            ],
            "steps": [
                self._step(ranks[number], context, batch, name)
                for number, context, batch, name in itertools.product(
                    self.ranks, self.contexts, self.batches, self.rules
                )
            ],
            "sweep": [
                point
                for number, context in itertools.product(self.ranks, self.contexts)
                for point in self._sweep(ranks[number], context)
            ],
        }

    def _setting(self, rank: Rank, context: int, name: str) -> dict[str, Any]:
        return {"ranks": rank.ranks, "context": context, "new_tokens": self.new_tokens, "policy": name}

    def _fitted(self, rank: Rank, context: int, eviction: EvictionConfig | None) -> tuple[Request, Room]:
        request = Request(context, self.new_tokens, eviction)
        return request, room_for(rank, request, self.chunk)

    def _room(self, rank: Rank, context: int, name: str) -> dict[str, Any]:
        """What a row takes on each rank, and how many fit."""
        _, room = self._fitted(rank, context, self.rules[name])
        return {
            **self._setting(rank, context, name),
            "kept_tokens": room.kept,
            "slots": room.slots,
            "weight_bytes": room.weights,
            "bytes_a_row": {
                "prompt_cache": room.prompt,
                "decode_cache": room.decode,
                "workspace": room.workspace,
            },
            "largest_batch": room.most_together(self.available),
            "sessions": room.most_one_by_one(self.available),
        }

    def _step(self, rank: Rank, context: int, batch: int, name: str) -> dict[str, Any]:
        """What so many rows take on each rank, and how fast they are decoded by all."""
        request, room = self._fitted(rank, context, self.rules[name])
        together, one_by_one = room.together(batch), room.one_by_one(batch)
        on = (self.device, self.shares, self.link)
        taken = step(rank, room, request, batch, *on)
        sizes = {"together": together, "one by one": one_by_one}
        fits = next((how for how, size in sizes.items() if size <= self.available), "no")
        rehearsing = 1 if fits == "one by one" else batch
        return {
            **self._setting(rank, context, name),
            "batch": batch,
            "bytes_read_together": together,
            "bytes_read_one_by_one": one_by_one,
            "fits": fits,
            "limit_ms": 1000 * taken.limit,
            "ms": 1000 * taken.seconds,
            "parts_ms": {part: 1000 * seconds for part, seconds in taken.parts.items()},
            "bottleneck": taken.bottleneck,
            "tokens_per_second": batch / taken.seconds,
            "rehearsal_ms": 1000 * rehearsal(rank, room, request, rehearsing, *on),
        }

    def _sweep(self, rank: Rank, context: int) -> Iterator[dict[str, Any]]:
        """The rule that evicts, at one compression after the other: how many sessions fit, and how fast one
        is and all of them are."""
        name = next((name for name, eviction in self.rules.items() if eviction is not None), None)
        if name is None:
            return
        for compression in COMPRESSIONS:
            try:
                eviction = policy(name, compression=compression)
                request, room = self._fitted(rank, context, eviction)
            except ValueError:  # less is kept than the rule protects
                continue
            sessions = room.most_one_by_one(self.available)
            speeds = {
                rows: rows / step(rank, room, request, rows, self.device, self.shares, self.link).seconds
                for rows in {1, max(1, sessions)}
            }
            yield {
                **self._setting(rank, context, name),
                "compression": compression,
                "largest_batch": room.most_together(self.available),
                "sessions": sessions,
                "tokens_per_second_of_one": speeds[1],
                "tokens_per_second_of_all": speeds[sessions] if sessions else 0.0,
            }
