"""Retention sets: which token is in which slot, its utility, and the slot that the next token takes.

Slots are physical, positions are logical. A token keeps the position it has in the uncompressed sequence,
whatever is evicted around it, and its slot says nothing about its age.

Shape letters: B batch, X retention sets a row (1, or one for each KV head), T query tokens, N slots, K slots
kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

EMPTY = -1
"""Position of a slot that holds no token."""

NO_POSITION = torch.iinfo(torch.int32).max
"""Newer than every position."""


class TensorState(nn.Module):
    """A module of tensors alone, which compiled graphs read and write in place at fixed addresses."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...

    def add(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor)


class RetentionSets(TensorState):
    """The sets of one layer, or the one that all layers share.

    * `position_BXN` int32: the logical position in each slot, `EMPTY` where there is none;
    * `utility_BXN`: each token's utility m, float32 (float64 for a float64 model), 0 where empty;
    * `free_BX` int64: the slot that the set's next token takes;
    * `budget_BX` int64: tokens that the set keeps.
    """

    def __init__(self, batch: int, sets: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = (batch, sets, slots)
        self.add("position_BXN", torch.full(size, EMPTY, dtype=torch.int32, device=device))
        self.add("utility_BXN", torch.zeros(size, dtype=dtype, device=device))
        self.add("free_BX", torch.zeros(size[:2], dtype=torch.int64, device=device))
        self.add("budget_BX", torch.full(size[:2], slots, device=device))

    @property
    def count_BX(self) -> Tensor:
        """Tokens that each set holds, int64."""
        return (self.position_BXN > EMPTY).sum(-1)

    def clear(self) -> None:
        """Forget all tokens."""
        self.position_BXN.fill_(EMPTY)
        self.utility_BXN.zero_()
        self.free_BX.zero_()

    def insert(self, slots_BXT: Tensor, positions_BT: Tensor) -> None:
        """Enter new tokens, of utility 0. A token at position `EMPTY` is padding and enters nothing."""
        positions_BXT = positions_BT.to(torch.int32)[:, None].expand_as(slots_BXT)
        self.position_BXN.scatter_(-1, slots_BXT, positions_BXT)
        self.utility_BXN.scatter_(-1, slots_BXT, 0.0)

    def mean_utility(self) -> Tensor:
        """Of the tokens of each set, [B, X]."""
        # Summed in float64: tokens that take the mean in turn must come out equal, for ties to be ties.
        mean_BX = self.utility_BXN.double().sum(-1) / self.count_BX.clamp_min(1)
        return mean_BX.to(self.utility_BXN.dtype)

    def keep(self, keep_BXN: Tensor) -> None:
        """Evict all tokens but those marked, in place. Every set must have an empty slot then."""
        self.position_BXN.masked_fill_(~keep_BXN, EMPTY)
        self.utility_BXN.masked_fill_(~keep_BXN, 0.0)
        self.free_BX.copy_((~keep_BXN).int().argmax(-1))

    def take_from(self, source: RetentionSets, keep_BXN: Tensor) -> tuple[Tensor, list[list[int]]]:
        """Hold the tokens that `keep_BXN` marks in `source`, oldest first, with their utilities and budgets.
        Returns the slots that they had, [B, X, K], and how many of these mean anything in each set."""
        count_BX = keep_BXN.sum(-1)
        kept = int(count_BX.max())
        assert kept < self.position_BXN.shape[-1], (
            f"{kept} tokens and a next one in {self.position_BXN.shape}"
        )
        position_BXN, utility_BXN = source.position_BXN, source.utility_BXN
        age_BXN = torch.where(keep_BXN, position_BXN, NO_POSITION)
        slots_BXK = age_BXN.argsort(-1)[..., :kept]
        real_BXK = torch.arange(kept, device=keep_BXN.device) < count_BX[..., None]

        self.position_BXN.fill_(EMPTY)
        self.position_BXN[..., :kept] = torch.where(real_BXK, position_BXN.gather(-1, slots_BXK), EMPTY)
        self.utility_BXN.zero_()
        self.utility_BXN[..., :kept] = torch.where(real_BXK, utility_BXN.gather(-1, slots_BXK), 0.0)
        self.free_BX.copy_(count_BX)
        self.budget_BX.copy_(source.budget_BX)
        return slots_BXK, count_BX.tolist()
