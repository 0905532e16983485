"""Records what decode steps saw, inside the graph, for analysis.

Shape letters: B batch, L layers, N slots, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.retention import RetentionSets, TensorState


@dataclass(frozen=True)
class Recording:
    """The decode steps of one answer, of the shared retention set, before each step's eviction. A first step
    that evicted a whole prompt is not among them."""

    position_TBN: Tensor
    """int32: the position in each slot, -1 where empty; slots do not move."""
    utility_TBN: Tensor
    """float32: utilities m after the step's update."""
    score_TLBN: Tensor
    """float32: each layer's raw scores, NaN where the layer or the step did not score."""
    newest_TB: Tensor
    """int64: position of the token that the step fed, -1 where the row had ended."""


class Recorder(TensorState):
    """Buffers for the first `steps` decode steps of an answer; steps beyond them are not recorded."""

    def __init__(self, steps: int, layers: int, batch: int, slots: int, device: torch.device) -> None:
        super().__init__()
        self.sizes = (steps, layers, batch, slots)
        for name, dtype, size in (
            ("position_TBN", torch.int32, (batch, slots)),
            ("utility_TBN", torch.float32, (batch, slots)),
            ("score_TLBN", torch.float32, (layers, batch, slots)),
            ("newest_TB", torch.int64, (batch,)),
        ):  # One step more: it takes what comes after the others.
            self.add(name, torch.empty(steps + 1, *size, dtype=dtype, device=device))
        self.add("cursor", torch.zeros((), dtype=torch.int64, device=device))

    def record(self, sets: RetentionSets, score_BXN: dict[int, Tensor], newest_B: Tensor) -> None:
        """Record one step; runs inside the graph. Layers that are not in `score_BXN` did not score."""
        score_LBN = torch.full_like(self.score_TLBN[0], torch.nan)
        for layer, of_layer_BXN in score_BXN.items():
            score_LBN[layer, :, : of_layer_BXN.shape[-1]] = of_layer_BXN[:, 0]
        for buffer, value in (
            (self.position_TBN, sets.position_BXN[:, 0]),
            (self.utility_TBN, sets.utility_BXN[:, 0].float()),
            (self.score_TLBN, score_LBN),
            (self.newest_TB, newest_B),
        ):
            buffer.index_copy_(0, self.cursor[None], value[None])
        self.cursor.copy_((self.cursor + 1).clamp_max(len(self.newest_TB) - 1))

    def recording(self) -> Recording:
        """What was recorded since the last `start`, on the CPU."""
        steps = int(self.cursor)
        buffers = (self.position_TBN, self.utility_TBN, self.score_TLBN, self.newest_TB)
        return Recording(*(buffer[:steps].cpu() for buffer in buffers))

    def start(self) -> None:
        self.cursor.zero_()
