"""Arithmetic that compiles to good loops: sums in a wide dtype, stored intermediates, random numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, softmax, scores and utilities: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def materialize(x: Tensor) -> Tensor:
    """`x`, computed once and stored. The compiler would compute it again for every output that reads it, be
    it a norm, an activation or an exponential; a view by strides makes it store the result first."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Random float32 in [0, 1) with 24 bits, as a hash of (seed, position): no draw depends on those before
    it. Both are int64 and not negative."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    mixed = _mix(_mix(_mix(low) ^ high) ^ (position & 0xFFFFFFFF))
    return (mixed >> 8).to(torch.float32) * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64, whose output bits all depend on all input bits (rounds of
    xor, shift and multiply, as in the finalizers of murmur hashes)."""
    # Every round reads its input twice. Written out, that is up to 2^15 times.
    x = materialize(x)
    for multiplier in (0x7FEB352D, 0x68E31DA4 | 1):
        x = x ^ (x >> 16)
        x = (x * multiplier) & 0xFFFFFFFF  # factors below 2^32 and 2^31: no overflow in int64
        x = x ^ (x >> 15)
    return x ^ (x >> 16)
