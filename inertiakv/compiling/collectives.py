"""Tensor parallelism: several processes hold one model, each with its own heads of every layer.

A rank sees K, V and attention of its own heads only, but all heads share one retention set. Scores are
means over heads and the recurrence over layers is linear, so each rank runs it on its own heads and the
ranks average the utilities afterwards. Where several queries score together and the maximum counts, the
ranks average in every layer, before the maximum. All ranks decide from these means and from the same
logits, so all decide alike. This relies on reductions that give every rank the same bits, as those of NCCL
and gloo do.

Shape letters: B batch, X retention sets, N slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorParallel(NamedTuple):
    """This process' place in a group of `size` processes. Plain values, so that a graph treats them as
    constants; a single process traces no collectives."""

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
