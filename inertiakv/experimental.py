"""What the paper tried and found no better: to choose alpha from the scores, and to refresh where ranks
disagree.

Both are configs like any other, for one retention set of all layers. The paper describes them in a sentence
each (arXiv 2609.03515, negative results); what it leaves open is said here.

Shape letters: B batch, X retention sets, N slots, L layers, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .aggregation import layer_coefficients
from .config import EvictionConfig
from .eviction import EMPTY
from .recording import Recording
from .table import Table

ALPHAS = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95)
"""What `AdaptiveAlpha` chooses from."""


@dataclass(frozen=True)
class AdaptiveAlpha(EvictionConfig):
    """An EMA whose alpha is chosen once, after a warm-up with the alpha given.

    Of the warm-up's decode steps it takes the noise sigma, how much the layers' top sets differ within a step
    (1 - Jaccard, mean over pairs), and the drift delta, how much the set of their mean score differs from
    step to step. Then it takes the alpha with the least `2 (1 - alpha) / (1 + alpha) * sigma^2 + lag^2`: the
    bound on the noise that smoothing leaves, and the drift times the steps that the smoothed score lags
    behind, `a / (1 - a)` for a memory `a` from step to step. Sets are the better half of the budget: of a
    full one they would all be alike. One row at a time, since rows of a batch would share their alpha.
    """

    warm_up: int = 10
    """Decode steps, after the first, to learn from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_shared(self)
        if self.alpha is None or self.refresh != 1:
            raise ValueError("an adaptive alpha needs a rule that has an alpha, and refresh=1")
        if self.draft:
            raise ValueError(f"an adaptive alpha learns from the answer, and not from draft={self.draft}")
        if self.warm_up < 2:
            raise ValueError(f"warm_up must be at least 2 steps, got {self.warm_up}")

    def choose(self, recording: Recording, budget: int) -> float:
        """The alpha for the one row of a recorded warm-up."""
        position_TN = recording.position_TBN[: self.warm_up, 0]
        score_TLN = recording.score_TLBN[: self.warm_up, :, 0]
        if self.layers is not None:
            score_TLN = score_TLN[:, sorted(self.layers)]
        best_TLN = _better_half(score_TLN, position_TN[:, None], budget)
        best_TN = _better_half(score_TLN.nanmean(1), position_TN, budget)
        pairs = torch.combinations(torch.arange(best_TLN.shape[1]), 2)
        differences = _difference(best_TLN[:, pairs[:, 0]], best_TLN[:, pairs[:, 1]])
        noise = float(differences.mean()) if len(pairs) else 0.0
        drift = float(_difference(best_TN[1:], best_TN[:-1]).mean())
        return min(ALPHAS, key=lambda alpha: self._loss(alpha, noise, drift, score_TLN.shape[1]))

    def _loss(self, alpha: float, noise: float, drift: float, num_layers: int) -> float:
        decay, _ = layer_coefficients(replace(self, alpha=alpha), num_layers)
        memory = float(torch.tensor(decay, dtype=torch.float64).prod())
        return 2 * (1 - alpha) / (1 + alpha) * noise**2 + (drift * memory / (1 - memory)) ** 2


@dataclass(frozen=True)
class RankTrigger(EvictionConfig):
    """Utilities that change only where ranks disagree: a step's scores are taken where the better half of the
    budget by the utilities with them differs by more than `threshold` (1 - Jaccard) from that without. Else
    the step is as one without refresh. Every step is scored, so nothing is saved: what it shows is whether
    the moment of a refresh matters."""

    threshold: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_shared(self)
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be in [0, 1), got {self.threshold}")

    @property
    def form(self) -> tuple[Any, ...]:
        return (*super().form, self.threshold)

    def settle(self, table: Table, before_BXN: Tensor) -> None:
        """Put the utilities `before_BXN` back in the rows where the new ones rank the tokens alike. In
        graph."""
        budget_BX = table.budget_BX
        old_BXN, new_BXN = (
            _better_half(utility_BXN, table.position_BXN, budget_BX)
            for utility_BXN in (before_BXN, table.utility_BXN)
        )
        differ_BX1 = _difference(old_BXN, new_BXN)[..., None] > self.threshold
        table.utility_BXN.copy_(torch.where(differ_BX1, table.utility_BXN, before_BXN))


def _check_shared(config: EvictionConfig) -> None:
    if not config.scores_one_set:
        raise ValueError("this needs a rule that scores, for one set of all layers (scope='shared')")
    if config.after != "rule":
        raise ValueError(f"this scores while decoding, which after={config.after!r} does not")


def _better_half(value_N: Tensor, position_N: Tensor, budget: Tensor | int) -> Tensor:
    """Bool mask of the tokens with the largest values, half as many as the budget, at least one."""
    value_N = torch.where(position_N > EMPTY, value_N, -torch.inf)
    rank_N = value_N.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    half = torch.as_tensor(budget, device=value_N.device).div(2, rounding_mode="floor").clamp_min(1)
    return (rank_N < half[..., None]) & (position_N > EMPTY)


def _difference(a_N: Tensor, b_N: Tensor) -> Tensor:
    """1 - Jaccard."""
    return 1 - (a_N & b_N).sum(-1) / (a_N | b_N).sum(-1).clamp_min(1)
