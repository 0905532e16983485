"""Processes that hold one model together, each with its heads of every layer: what they tell one another.

A rank sees the K, V and attention of its own heads, and the retention set is one for all heads. Where a
score is a mean over heads, and what becomes of it is linear, as the recurrence over layers is, each rank runs
the recurrence with the mean over its own heads; the mean of what the ranks come out with is what one process
would have. Where several queries score together and the best one counts, the mean over ranks comes before
that, in every layer. Every decision is made from such means and from logits that all ranks have, so that all
decide alike. That rests on a reduction giving each rank the same bits, as those of NCCL and gloo do: a sum is
made once, in one place, and handed to all.

Shape letters: B batch, X retention sets, N slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import EvictionConfig, ScorerName
from .experimental import AdaptiveAlpha
from .table import Table

OF_ALL_HEADS: tuple[ScorerName, ...] = ("entropy", "learned", "reconstruction")
"""Scorers that are no mean of what single heads say."""


class Ranks(NamedTuple):
    """Which of `size` processes this is, and the name of their process group. Plain values, which a graph
    takes for constants; of one process alone nothing is traced."""

    rank: int = 0
    size: int = 1
    group: str = ""
    kv_copies: int = 1
    """How many ranks hold each KV head; their query heads differ."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, the same bits on each."""
        if self.size == 1:
            return x
        collectives = torch.ops._c10d_functional
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", self.group))

    def mean(self, x: Tensor) -> Tensor:
        """The mean of all ranks' tensors, the same bits on each."""
        return x if self.size == 1 else self.sum(x) / self.size

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors side by side, [..., n] to [..., size * n]."""
        if self.size == 1:
            return x
        collectives = torch.ops._c10d_functional
        parts = collectives.all_gather_into_tensor(x.contiguous(), self.size, self.group)
        return collectives.wait_tensor(parts).unflatten(0, (self.size, -1)).movedim(0, -2).flatten(-2)


ALONE = Ranks()


def ranks_of(model: Any) -> Ranks:
    """Those that hold the model, which need not know of any."""
    return getattr(model, "ranks", ALONE)


def check_rule(eviction: EvictionConfig | None, ranks: Ranks) -> None:
    """Raise ValueError for a rule by which ranks, each with its own heads, would not keep what one process
    with all of them keeps."""
    if eviction is None or ranks.size == 1:
        return
    rule = f"scorer={eviction.scorer!r}, scope={eviction.scope!r}"
    problem = None
    if eviction.scorer in OF_ALL_HEADS:
        problem = f"scorer={eviction.scorer!r} looks at all heads together"
    elif eviction.scorer == "expected_attention" and ranks.kv_copies > 1:
        problem = f"{rule} takes the best token of a KV head, which {ranks.kv_copies} ranks share"
    elif isinstance(eviction, AdaptiveAlpha):
        problem = "an adaptive alpha is chosen from the scores of all heads"
    elif eviction.allocation in ("adaptive", "model"):
        problem = f"allocation={eviction.allocation!r} compares all heads"
    elif eviction.scope == "head" and ranks.kv_copies > 1:
        problem = f"scope='head' has a set for each KV head, which {ranks.kv_copies} ranks share"
    elif eviction.scope == "head" and eviction.scorer == "random":
        problem = f"{rule} numbers a layer's heads"
    if problem is not None:
        raise ValueError(f"{problem}: not with the model on {ranks.size} ranks")


def check_agreement(ranks: Ranks, token_B: Tensor, tables: Sequence[Table]) -> None:
    """Raise RuntimeError, on all ranks, where they have not chosen the same tokens, or, of sets that all of
    them have, not kept the same. For debugging: it waits for the device."""
    compared = {"tokens": token_B}
    for index, table in enumerate(tables):
        compared |= {f"kept set {index}": table.position_BXN, f"utilities {index}": table.utility_BXN}
    mine = torch.cat([tensor.flatten().double() for tensor in compared.values()])
    of_ranks = ranks.gather(mine).unflatten(0, (ranks.size, -1))
    differ = (of_ranks != of_ranks[0]).split([tensor.numel() for tensor in compared.values()], dim=1)
    for name, differ_there in zip(compared, differ, strict=True):
        if others := differ_there.any(-1).nonzero()[:, 0].tolist():
            named = ", ".join(map(str, others))
            raise RuntimeError(f"ranks disagree: {name} of rank {named} differ from those of rank 0")
