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

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorParallel(NamedTuple):
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


SINGLE_PROCESS = TensorParallel()


def tensor_parallel_of(model: Any) -> TensorParallel:
    """The group that holds a model; a model without one is held by a single process."""
    return getattr(model, "tp", SINGLE_PROCESS)
