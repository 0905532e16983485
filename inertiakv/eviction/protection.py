"""Tokens that are never evicted. Protection is a mask, not a bonus to the utility, which low precision
could swallow.

Shape letters: B batch, X retention sets, N slots, S segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.retention import EMPTY


class Limits(NamedTuple):
    """How many tokens of a row are never evicted: at the start of the sequence (sinks), the newest
    (recent), and spaced evenly over the prompt (None: none)."""

    sinks_B: Tensor
    recent_B: Tensor
    prompt_B: Tensor
    spaced_B: Tensor | None

    @property
    def number_B(self) -> Tensor:
        """How many they are at most: among the newest there may be some of those spaced evenly."""
        number_B = self.sinks_B + self.recent_B
        return number_B if self.spaced_B is None else number_B + self.spaced_B


def protected(position_BXN: Tensor, newest_B: Tensor, limits: Limits) -> Tensor:
    """Bool mask of the tokens never evicted, where the newest position is `newest_B`."""
    newest_B11, sinks_B11, recent_B11 = (
        x_B[:, None, None] for x_B in (newest_B, limits.sinks_B, limits.recent_B)
    )
    protected_BXN = (position_BXN < sinks_B11) | (position_BXN > newest_B11 - recent_B11)
    if limits.spaced_B is not None:
        # One position in each of `spaced` equal parts of the prompt.
        prompt_B11, spaced_B11 = limits.prompt_B[:, None, None], limits.spaced_B[:, None, None]
        chosen_BXN = position_BXN.long() * spaced_B11 % prompt_B11 < spaced_B11
        protected_BXN = protected_BXN | (chosen_BXN & (position_BXN < prompt_B11))
    return protected_BXN


def rescued(position_BXN: Tensor, utility_BXN: Tensor, prompt_B: Tensor, segments: int) -> Tensor:
    """Bool mask of the best token in each of `segments` equal parts of the prompt, of equals the newest."""
    prompt_B11 = prompt_B[:, None, None]
    inside_BXN = (position_BXN > EMPTY) & (position_BXN < prompt_B11)
    segment_BXN = torch.where(inside_BXN, position_BXN.long() * segments // prompt_B11, segments)
    best_BXN = inside_BXN
    for key_BXN in (utility_BXN, position_BXN.to(utility_BXN.dtype)):
        key_BXN = torch.where(best_BXN, key_BXN, -torch.inf)
        top_BXS = key_BXN.new_full((*key_BXN.shape[:-1], segments + 1), -torch.inf)
        top_BXS = top_BXS.scatter_reduce(-1, segment_BXN, key_BXN, "amax")
        best_BXN = best_BXN & (key_BXN == top_BXS.gather(-1, segment_BXN))
    return best_BXN
