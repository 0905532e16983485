"""Utilities of every kind that a rule may have to choose by, and those that are easily chosen wrongly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "distinct": lambda u: u,
    "few values": lambda u: (u * 3).round(),
    "all equal": lambda u: u * 0 + 0.25,
    "infinite": lambda u: torch.where(u < 0.3, -torch.inf, torch.where(u > 0.7, torch.inf, u)),
    "all +inf": lambda u: u * 0 + torch.inf,
    "all -inf": lambda u: u * 0 - torch.inf,
    # Beyond 8,192 the numbers of bfloat16 are 64 apart: 10,000 + 1 is 10,000.
    "coarse": lambda u: (1e4 + (u * 200)).to(torch.bfloat16).float(),
    "coarse negative": lambda u: (-1e4 - (u * 200)).to(torch.bfloat16).float(),
    "tiny": lambda u: u * 1e-42,
}
kinds = st.sampled_from(sorted(KINDS))
seeds = st.integers(0, 2**31)
