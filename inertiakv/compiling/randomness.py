"""Random numbers as a hash, so that a graph makes them and no draw depends on those before it."""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu import materialize


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Float32 in [0, 1) with 24 random bits, a function of (seed, position) alone; both int64, not
    negative."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    mixed = _mix(_mix(_mix(low) ^ high) ^ (position & 0xFFFFFFFF))
    return (mixed >> 8).to(torch.float32) * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64, whose output bits all depend on all input bits (xor, shift,
    multiply rounds as in the finalizers of murmur hashes)."""
    # Every round reads its input twice. The compiler would write all of that out, up to 2^15 times.
    x = materialize(x)
    for multiplier in (0x7FEB352D, 0x68E31DA4 | 1):
        x = x ^ (x >> 16)
        x = (x * multiplier) & 0xFFFFFFFF  # both factors below 2^32 and 2^31: no overflow in int64
        x = x ^ (x >> 15)
    return x ^ (x >> 16)
