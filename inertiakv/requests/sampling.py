"""Choosing the next token, inside the graph.

Randomness is a hash of (seed, position): a row's stream depends on nothing else, neither on its neighbours
nor on how the steps before it were batched.

Shape letters: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from ..compiling.numerics import uniform
from ..config import MAX_SEED, check_int


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The default, temperature 0, is greedy.

    Filters apply in the order top-k, top-p, min-p, each to what the one before it left, after the
    temperature. Raises ValueError for a value out of range, and for a filter or seed that greedy decoding
    would ignore.
    """

    temperature: float = 0.0
    """0 takes the likeliest token; above, logits are divided by it."""
    top_k: int | None = None
    """Keep the k likeliest tokens."""
    top_p: float | None = None
    """Keep the fewest likeliest tokens whose probabilities add up to at least p, in (0, 1]."""
    min_p: float | None = None
    """Keep tokens at least this share as likely as the likeliest, in [0, 1]."""
    seed: int | Sequence[int] | None = None
    """One for all rows, so that a row in a batch draws as it would alone, or one for each row. 0 by
    default."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            missing = value is None and name != "temperature"
            if not missing and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if self.temperature != 0 and not 1e-3 <= self.temperature <= 1e3:
            raise ValueError(f"temperature must be 0 (greedy) or in [0.001, 1000], got {self.temperature}")
        if self.greedy:
            for name in ("top_k", "top_p", "min_p", "seed"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)} has no effect at temperature 0 (greedy)")
        if self.top_k is not None:
            check_int("top_k", self.top_k, 1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        for seed in self.seed if isinstance(self.seed, Iterable) else [self.seed or 0]:
            if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) <= MAX_SEED:
                raise ValueError(f"a seed must be a whole number in [0, 2**63), got {seed!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def seeds(self, rows: int) -> list[int]:
        """A seed for each row. Raises ValueError where their number is another."""
        seed = self.seed
        seeds = list(map(int, seed)) if isinstance(seed, Iterable) else [int(seed or 0)] * rows
        if len(seeds) != rows:
            raise ValueError(f"{len(seeds)} seeds for {rows} prompts")
        return seeds


def sample(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
) -> Tensor:
    """A token a row, int64 [B], for the sequence position `position_B`; by inverting the filtered
    distribution."""
    sorted_BV, token_BV = (logits_BV / temperature_B[:, None]).sort(dim=-1, descending=True, stable=True)
    p_BV = sorted_BV.softmax(-1)
    rank_V = torch.arange(p_BV.shape[-1], device=p_BV.device)
    p_BV = torch.where(rank_V < top_k_B[:, None], p_BV, 0.0)
    p_BV = p_BV / p_BV.sum(-1, keepdim=True)
    before_BV = p_BV.cumsum(-1) - p_BV
    p_BV = torch.where((before_BV < top_p_B[:, None]) | (rank_V == 0), p_BV, 0.0)
    p_BV = torch.where(p_BV >= min_p_B[:, None] * p_BV[:, :1], p_BV, 0.0)
    mass_BV = p_BV.cumsum(-1)
    target_B1 = uniform(seed_B, position_B)[:, None] * mass_BV[:, -1:]
    choice_B1 = (mass_BV <= target_B1).sum(-1, keepdim=True)
    last_B1 = (p_BV > 0).sum(-1, keepdim=True) - 1
    # Where logits are not finite nothing has a probability: the first, which is then no number itself.
    return token_BV.gather(-1, torch.minimum(choice_B1, last_B1).clamp_min(0))[:, 0]
