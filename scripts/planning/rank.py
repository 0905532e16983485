"""One of several devices among which a model is split, as models/parallel.py splits it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inertiakv.compiling.collectives import TensorParallel
from inertiakv.models import ModelConfig, Transformer
from inertiakv.models.quantize import make_room
from inertiakv.scripts.benchmarking import traffic


@dataclass(frozen=True)
class Rank:
    """A model as one rank holds it, on the meta device."""

    model: Transformer
    ranks: int
    parameters: int
    """Numbers that it holds."""
    active: int
    """Weights that a token is multiplied with."""

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def weights(self) -> int:
        """Bytes that it holds."""
        return sum(parameter.nbytes for parameter in self.model.parameters())


def rank_of(config: ModelConfig, dtype: torch.dtype, quantize: str | None, ranks: int) -> Rank:
    """The first of them. Raises ValueError for what cannot be split."""
    with torch.device("meta"):
        model = Transformer(config, TensorParallel(size=ranks)).to(dtype)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        active = traffic.active_weights(model)
        if quantize is not None:
            make_room(model)
    return Rank(model, ranks, parameters, active)
