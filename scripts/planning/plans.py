"""A plan: what is said of a model on a device, as plain values for JSON, tables and the chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from inertiakv import EvictionConfig, policy
from inertiakv.models import ModelConfig
from inertiakv.scripts.benchmarking import traffic

from .devices import THIS
from .memory import Footprint, Shard, make_footprint, make_shard
from .speed import Machine, decode_step, rehearsal

FULL = "full"
COMPRESSIONS = (0.0, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99)


@dataclass(frozen=True)
class Plan:
    """What is asked: every number of ranks with every context and batch, with a policy and the full cache."""

    name: str
    config: ModelConfig
    dtype: torch.dtype
    quantize: str | None
    machine: Machine
    usable: float
    """Share of the memory that may be filled."""
    policy: str
    eviction: EvictionConfig | None
    ranks: Sequence[int]
    contexts: Sequence[int]
    batches: Sequence[int]
    new_tokens: int

    @property
    def available(self) -> float:
        return self.usable * self.machine.device.memory

    def as_json(self) -> dict[str, Any]:
        """Raises ValueError for what cannot be split, or evicted to its budget."""
        device = self.machine.device
        whole = make_shard(self.config, self.dtype, self.quantize, 1)
        shards = {
            ranks: make_shard(self.config, self.dtype, self.quantize, ranks) if ranks > 1 else whole
            for ranks in self.ranks
        }
        rules = {FULL: None, self.policy: self.eviction}
        footprints = {
            (ranks, context, name): make_footprint(
                shards[ranks], context, self.new_tokens, rules[name], on_cpu=device.kind == "cpu"
            )
            for ranks, context, name in product(self.ranks, self.contexts, rules)
        }
        return {
            "model": {
                "name": self.name,
                "dtype": str(self.dtype).removeprefix("torch."),
                "quantize": self.quantize,
                "parameters": whole.parameters,
                "weight_bytes": whole.weight_bytes,
                "kv_bytes_per_token": traffic.kv_bytes(self.config, [1], self.dtype),
            },
            "device": {
                "name": device.name,
                "memory_bytes": round(device.memory),
                "usable": self.usable,
                "bytes_per_second": round(device.bandwidth),
                "flops_per_second": device.flops.get(self.dtype.itemsize),
                "interconnect_bytes_per_second": self.machine.link and self.machine.link.bandwidth,
            },
            "shares": vars(self.machine.shares),
            "rooms": [self._setting(*key) | self._memory(fp) for key, fp in footprints.items()],
            "steps": [
                self._setting(ranks, context, name) | self._step(footprints[ranks, context, name], batch)
                for ranks, context, batch, name in product(self.ranks, self.contexts, self.batches, rules)
            ],
            "sweep": [
                self._setting(ranks, context, self.policy) | point
                for ranks, context in product(self.ranks, self.contexts)
                for point in self._sweep(shards[ranks], context)
            ],
            "notes": self.notes(),
        }

    def _setting(self, ranks: int, context: int, name: str) -> dict[str, Any]:
        return {"ranks": ranks, "context": context, "new_tokens": self.new_tokens, "policy": name}

    def _memory(self, footprint: Footprint) -> dict[str, Any]:
        """What a row takes on each rank, and how many fit."""
        return {
            "kept_tokens": footprint.kept,
            "slots": footprint.slots,
            "weight_bytes": footprint.weights,
            "bytes_a_row": {
                "prompt_cache": footprint.prompt_cache,
                "decode_cache": footprint.decode_cache,
                "workspace": footprint.workspace,
            },
            "largest_batch": footprint.most_together(self.available),
            "sessions": footprint.most_one_by_one(self.available),
        }

    def _step(self, footprint: Footprint, batch: int) -> dict[str, Any]:
        """What so many rows take on each rank, and how fast they are decoded by all."""
        step = decode_step(footprint, batch, self.machine)
        sizes = {"together": footprint.together(batch), "one by one": footprint.one_by_one(batch)}
        fits = next((how for how, size in sizes.items() if size <= self.available), "no")
        rehearsed_rows = 1 if fits == "one by one" else batch
        return {
            "batch": batch,
            "bytes_read_together": sizes["together"],
            "bytes_read_one_by_one": sizes["one by one"],
            "fits": fits,
            "limit_ms": 1000 * step.limit,
            "ms": 1000 * step.seconds,
            "parts_ms": {part: 1000 * seconds for part, seconds in step.parts.items()},
            "bottleneck": step.bottleneck,
            "tokens_per_second": batch / step.seconds,
            "rehearsal_ms": 1000 * rehearsal(footprint, rehearsed_rows, self.machine),
        }

    def _sweep(self, shard: Shard, context: int) -> Iterator[dict[str, Any]]:
        """The policy at one compression after the other: how many sessions fit, and how fast they are."""
        if self.eviction is None:
            return
        for compression in COMPRESSIONS:
            try:
                eviction = policy(self.policy, compression=compression)
                footprint = make_footprint(
                    shard, context, self.new_tokens, eviction, on_cpu=self.machine.device.kind == "cpu"
                )
            except ValueError:  # less is kept than the rule protects
                continue
            sessions = footprint.most_one_by_one(self.available)
            speeds = [n / decode_step(footprint, n, self.machine).seconds for n in (1, max(1, sessions))]
            yield {
                "compression": compression,
                "largest_batch": footprint.most_together(self.available),
                "sessions": sessions,
                "tokens_per_second_of_one": speeds[0],
                "tokens_per_second_of_all": speeds[1] if sessions else 0.0,
            }

    def notes(self) -> list[str]:
        """What a reader should know of where the numbers come from."""
        device, shares, rule, ranks = self.machine.device, self.machine.shares, self.eviction, max(self.ranks)
        said = []
        if shares.source != "given" and f"on {device.kind} " not in shares.source:
            said.append(
                f"nothing was measured on {device.kind} yet: the shares are those of another kind of device"
            )
        if device.kind == "cuda" and device.name != THIS:
            said.append("a bandwidth from a data sheet is more than programs read with")
        if ranks > 1 and self.machine.link is None:
            said.append("all-reduces take no time here: see --interconnect-gb-per-s")
        if ranks > self.config.num_kv_heads:
            said.append(f"{self.config.num_kv_heads} KV heads are fewer than ranks: each is on several")
        if rule is None:
            return said
        for context in self.contexts:
            if rule.budget is not None and rule.budget >= context:
                said.append(f"a budget of {rule.budget:,} tokens evicts nothing of a context of {context:,}")
        if rule.draft and (rule.budget or 0) < max(self.contexts):
            said.append(
                f"rehearsal ms: {rule.drafts} drafts of {rule.draft} tokens before an answer's second token, "
                "decode steps and a pass over the prompt each, of all rows or, one by one, of each; "
                "no part of ms and token/s"
            )
        if rule.allocation in ("adaptive", "model"):
            said.append(
                "buffers are as large as the fullest set needs, which only a prompt tells: at least what is "
                "said"
            )
        return said
