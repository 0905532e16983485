"""An eviction rule as steps and graphs use it.

Shape letters: B batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..attention.backend import Backend
from ..compiling.collectives import SINGLE_PROCESS, TensorParallel
from ..compiling.numerics import accumulation_dtype, uniform
from ..config import EvictionConfig
from ..eviction.pooling import Pooling
from ..eviction.protection import Limits
from ..scoring.aggregation import Coefficients, layer_coefficients
from ..scoring.learned import LearnedScorer
from .batch import BatchState


class DecodingRule(nn.Module):
    """An `EvictionConfig` (None: the full cache) together with everything that a step needs to follow it:
    backend, windows, coefficients of the recurrence.

    A module whose buffers hold the coefficients, so that another alpha recompiles nothing. Each layer has
    buffers of its own: views of one buffer have different offsets, and the compiler would not see that
    layers are alike. Buffers have one axis, since scalars compile a graph twice (test_compiler_defects.py).
    """

    refresh_due: torch.Tensor | None

    def __init__(
        self,
        config: EvictionConfig | None,
        num_layers: int,
        windows: tuple[int | None, ...],
        backend: Backend,
        dtype: torch.dtype,
        device: torch.device,
        *,
        learned: LearnedScorer | None = None,
        tp: TensorParallel = SINGLE_PROCESS,
        one_graph: bool = False,
    ) -> None:
        """`windows`: of all layers. `learned`: the scorer of that name. `one_graph`: steps with and without
        refresh are one graph, which `refresh_due` tells apart. Raises ValueError for layers that the model
        does not have."""
        super().__init__()
        self.config, self.backend, self.learned, self.tp = config, backend, learned, tp
        self.windows = tuple(dict.fromkeys(windows))
        self.scored_layers: tuple[int, ...] = ()
        self.register_buffer("refresh_due", torch.zeros(1, dtype=torch.bool) if one_graph else None)
        if config is None:
            return
        self.scored_layers = config.layers or tuple(range(num_layers))
        if self.scored_layers[-1] >= num_layers:
            raise ValueError(
                f"layer {self.scored_layers[-1]} cannot score: the model has layers 0 to {num_layers - 1}"
            )
        wide = accumulation_dtype(dtype)
        for layer in self.scored_layers:
            self.register_buffer(f"smoothing_{layer}", torch.empty(2, dtype=wide, device=device))
            if config.scorer == "random":
                self.register_buffer(f"salt_{layer}", torch.empty(1, dtype=torch.int64, device=device))
        self.follow(config)

    def follow(self, config: EvictionConfig) -> None:
        """Take over the numbers of another rule with the same `graph_key`."""
        self.config = config
        numbers_2L = torch.tensor(layer_coefficients(config, len(self.scored_layers)), dtype=torch.float64)
        salt_L = uniform(torch.tensor(config.scorer_seed or 0), torch.tensor(self.scored_layers)) * 2**30
        for index, (smoothing, salt) in enumerate(self.coefficients().values()):
            smoothing.copy_(numbers_2L[:, index])
            if salt is not None:
                salt.copy_(salt_L[index].long())

    def coefficients(self) -> dict[int, Coefficients]:
        """For each layer that scores."""
        return {
            layer: Coefficients(getattr(self, f"smoothing_{layer}"), getattr(self, f"salt_{layer}", None))
            for layer in self.scored_layers
        }

    @property
    def scores(self) -> bool:
        return self.config is not None and self.config.scores

    def refreshes_at(self, step: int) -> bool:
        """Whether decode step `step`, counted from 1, scores."""
        return self.config is not None and self.config.refreshes_at(step)

    def limits(self, state: BatchState) -> Limits:
        """What is protected in the rows."""
        spaced_B = state.spaced_B if self.config is not None and self.config.reserve > 0 else None
        return Limits(state.sinks_B, state.recent_B, state.prompt_B, spaced_B)

    @property
    def pooling(self) -> Pooling | None:
        if self.config is None or self.config.pool == 1:
            return None
        return Pooling(self.config.pool, self.config.pool_by)

    def scoring_fields(self, scored_B: torch.Tensor, **more: Any) -> dict[str, Any]:
        """The fields of a `ForwardState` that say how its tokens are scored."""
        assert self.config is not None
        tp = SINGLE_PROCESS if self.config.scope == "head" else self.tp
        return {"scorer": self.config.scorer, "scored_B": scored_B, "learned": self.learned, "tp": tp, **more}
