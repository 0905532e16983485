"""Devices, and how long a decode step takes there: reading the weights, or the arithmetic with them, and
reading K and V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from inertiakv.cache import memory
from inertiakv.scripts.benchmarking import machine, traffic

from .memory import Footprint

Kind = Literal["cpu", "cuda"]
THIS = "this"


@dataclass(frozen=True)
class Device:
    name: str
    kind: Kind
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second."""
    flops: dict[int, float]
    """Operations a second of matrix products, by the bytes of a number; empty where not known."""


@dataclass(frozen=True)
class Link:
    """What connects the ranks. An all-reduce over R ranks moves 2 (R - 1) / R of its bytes."""

    bandwidth: float
    """Bytes a second."""
    latency: float
    """Seconds that an all-reduce takes however small it is."""

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds for `size` bytes."""
        return self.latency + 2 * (ranks - 1) / ranks * size / self.bandwidth


# From the maker's data sheets (SXM where there are several forms): GB, GB/s, and Tflop/s of dense matrices in
# bfloat16 and in float32.
PRESETS = {
    name: Device(name, "cuda", 1e9 * gb, 1e9 * gb_per_s, {2: 1e12 * bfloat16, 4: 1e12 * float32})
    for name, gb, gb_per_s, bfloat16, float32 in (
        ("h200", 141, 4800, 989, 67),
        ("h100", 80, 3350, 989, 67),
        ("a100", 80, 2039, 312, 19.5),
        ("rtx-4090", 24, 1008, 165.2, 82.6),
    )
}


def this_device() -> Device:
    """This machine: the memory that is free now, and the bandwidth as measured now."""
    kind: Kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    free = memory.available_bytes(device)
    if free is None:
        raise ValueError("this system does not say how much memory is free: give --memory-gb")
    return Device(THIS, kind, free, machine.measure_read(device), {})


def choose_device(
    name: str | None, memory_gb: float | None, gb_per_s: float | None, tflops: float | None
) -> Device:
    """A preset, this machine, or a device of these figures. Raises ValueError where they do not make one."""
    if memory_gb is None and gb_per_s is None and tflops is None:
        name = name or THIS
        if name != THIS and name not in PRESETS:
            raise ValueError(f"unknown device {name!r}; choose from {THIS}, {', '.join(PRESETS)}")
        return this_device() if name == THIS else PRESETS[name]
    if name is not None:
        raise ValueError(f"--device {name} has a memory and bandwidth of its own: leave it, or those, out")
    if memory_gb is None or gb_per_s is None:
        raise ValueError("a device of your own needs both --memory-gb and --bandwidth-gb-per-s")
    flops = {} if tflops is None else dict.fromkeys((2, 4), 1e12 * tflops)
    return Device("your device", "cuda", 1e9 * memory_gb, 1e9 * gb_per_s, flops)


@dataclass(frozen=True)
class Shares:
    """Shares of the bandwidth that weights, and K and V, are read with."""

    weights: float
    kv: float
    flops: float | None
    """Operations a second, where a batch was measured that is bound by them."""
    source: str


@dataclass(frozen=True)
class Machine:
    """One device for each rank."""

    device: Device
    shares: Shares
    link: Link | None = None
    """None: all-reduces take no time."""


@dataclass(frozen=True)
class Step:
    limit: float
    """Seconds that no implementation can do without: weights once, kept K and V once, at full bandwidth."""
    parts: dict[str, float]
    """Seconds, by what they are spent on."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bottleneck(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


def decode_step(footprint: Footprint, rows: int, machine: Machine) -> Step:
    """A step of so many rows, on all ranks at once.

    K and V are read slot by slot, taken or not; on a GPU a step that scores reads K once more.
    """
    shard, refreshes, device = footprint.shard, footprint.refresh_share, machine.device
    kept = rows * traffic.row_bytes(shard.model, footprint.kept)
    limit = (traffic.weight_bytes(shard.model, rows) + kept) / device.bandwidth
    read, arithmetic = _weights(footprint, rows, machine)
    kv = rows * footprint.decode_kv / (device.bandwidth * machine.shares.kv)
    parts = {"weights": read} if read >= arithmetic else {"arithmetic": arithmetic}
    parts["K and V"] = kv * (1 + refreshes / 2) if device.kind == "cuda" else kv
    if machine.link is not None and shard.ranks > 1:
        scores = machine.link.all_reduce(rows * footprint.slots * 4, shard.ranks)
        parts["all-reduce"] = _hidden_states(footprint, rows, machine.link) + refreshes * scores
    return Step(limit, parts)


def rehearsal(footprint: Footprint, rows: int, machine: Machine) -> float:
    """Seconds that a rule's drafts take, once an answer: for each draft its decode steps after the first
    token, and a pass of its queries over K and V of the prompt."""
    shard, queries = footprint.shard, rows * footprint.draft
    if not queries or not footprint.prompt_cache:
        return 0.0
    decoding = (footprint.draft - 1) * decode_step(footprint, rows, machine).seconds
    scoring = max(_weights(footprint, queries, machine))
    scoring += rows * footprint.prompt_cache / (machine.device.bandwidth * machine.shares.kv)
    if machine.link is not None and shard.ranks > 1:
        scores = machine.link.all_reduce(queries * (footprint.context + footprint.draft) * 4, shard.ranks)
        scoring += _hidden_states(footprint, queries, machine.link) + shard.config.num_layers * scores
    return footprint.drafts * (decoding + scoring)


def _weights(footprint: Footprint, tokens: int, machine: Machine) -> tuple[float, float]:
    """Seconds of reading the weights that so many tokens need, and of the arithmetic with them."""
    shard, device, shares = footprint.shard, machine.device, machine.shares
    read = traffic.weight_bytes(shard.model, tokens) / (device.bandwidth * shares.weights)
    rate = device.flops.get(shard.model.dtype.itemsize) or (shares.flops if device.kind == "cpu" else None)
    return read, 0.0 if rate is None else 2 * shard.active_weights * tokens / rate


def _hidden_states(footprint: Footprint, tokens: int, link: Link) -> float:
    """Seconds of the all-reduces of so many tokens' hidden states: two a layer, and one more."""
    shard = footprint.shard
    size = tokens * shard.config.hidden_size * shard.model.dtype.itemsize
    return (2 * shard.config.num_layers + 1) * link.all_reduce(size, shard.ranks)
