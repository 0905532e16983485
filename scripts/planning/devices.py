"""Devices: their memory, the bandwidth that they read it with, their arithmetic, and what connects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from inertiakv.cache import memory
from inertiakv.scripts.benchmarking import machine

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


def choose(name: str | None, memory_gb: float | None, gb_per_s: float | None, tflops: float | None) -> Device:
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
