"""Devices: their memory, the bandwidth that they read it with, and their arithmetic."""

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


def _nvidia(name: str, gigabytes: int, gb_per_s: int, half: float, single: float) -> Device:
    return Device(name, "cuda", 1e9 * gigabytes, 1e9 * gb_per_s, {2: 1e12 * half, 4: 1e12 * single})


# As the maker's data sheets say (SXM where there are several forms): GB, GB/s, and teraflops in bfloat16 on
# tensor cores, not sparse, and in float32.
PRESETS = {
    device.name: device
    for device in (
        _nvidia("h200", 141, 4800, 989, 67),
        _nvidia("h100", 80, 3350, 989, 67),
        _nvidia("a100", 80, 2039, 312, 19.5),
        _nvidia("rtx-4090", 24, 1008, 165.2, 82.6),
    )
}


def this_device() -> Device:
    """What a model would be loaded onto here: memory that is free now, and the bandwidth, measured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    free = memory.available_bytes(device)
    if free is None:
        raise ValueError("this system does not say how much memory is free: give --memory-gb")
    kind: Kind = "cuda" if device.type == "cuda" else "cpu"
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
    for option, value in (
        ("memory-gb", memory_gb),
        ("bandwidth-gb-per-s", gb_per_s),
        ("tflops", tflops),
    ):
        check_positive(option, value)
    flops = {} if tflops is None else dict.fromkeys((2, 4), 1e12 * tflops)
    return Device("your device", "cuda", 1e9 * memory_gb, 1e9 * gb_per_s, flops)


def check_positive(option: str, value: float | None) -> None:
    """Raise ValueError for a given number that is not above 0, or not finite in smaller units."""
    if value is not None and not 0 < value < 1e15:
        raise ValueError(f"--{option} must be a number above 0, got {value:g} (and below 1e15)")
