"""From scores to utilities: every rule of the paper as one recurrence over layers.

Shape letters: B batch, X retention sets, L layers, N slots.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..compiling.randomness import uniform
from ..config import EvictionConfig
from .learned import LearnedScorer


def layer_coefficients(config: EvictionConfig, num_layers: int) -> tuple[list[float], list[float]]:
    """`decay` and `gain`, one for each layer that scores: after layer l, `m = decay[l] * m + gain[l] *
    score[l]`.

    The EMA of the paper is decay alpha, gain 1 - alpha in every layer, so that alpha weights layers
    and remembers steps at once. The other couplings are written out as an EMA over steps of a weighted mean
    over layers: the first layer decays the utility by the memory `a`, and every layer adds its share of 1 -
    a. Where layers have sets of their own nothing runs over layers, and `a` is alpha.
    """
    alpha = 0.0 if config.alpha is None else config.alpha
    if config.aggregation == "cumulative":
        return [1.0] * num_layers, [1.0] * num_layers
    if config.scope != "shared":
        memory = alpha if config.step_alpha is None else config.step_alpha
        return [memory] * num_layers, [1 - memory] * num_layers
    if config.coupling == "layer_temporal" and config.step_alpha is None:
        return [alpha] * num_layers, [1 - alpha] * num_layers

    weight = [
        1.0 if config.coupling == "temporal" else alpha ** (num_layers - 1 - i) for i in range(num_layers)
    ]
    memory = {"layer_temporal": alpha**num_layers, "temporal": alpha, "layer": 0.0}[config.coupling]
    if config.step_alpha is not None:
        memory = config.step_alpha
    total = sum(weight)
    return [memory] + [1.0] * (num_layers - 1), [(1 - memory) * w / total for w in weight]


class Coefficients(NamedTuple):
    """Of one layer: decay and gain, which its scores are taken up with, and what they start from where they
    are random, [1]."""

    smoothing: Tensor
    salt: Tensor | None = None


class Aggregation(nn.Module):
    """The recurrence's coefficients as buffers: a graph reads them, so that another alpha is no recompile.

    Buffers of each layer: the compiler takes layers for alike only where their inputs lie alike, and views of
    one buffer do not. As few as can be, since each takes it time. With one axis: of a number without any it
    asks for the value, and compiles a graph twice.
    """

    apart_from_graphs = ("alpha",)

    def __init__(
        self,
        config: EvictionConfig,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        learned: LearnedScorer | None = None,
    ) -> None:
        """`learned`: the scorer of that name. Raises ValueError for layers that the model does not have."""
        super().__init__()
        self.scorer, self.learned = config.scorer, learned
        self.layers = config.layers or tuple(range(num_layers))
        if self.layers[-1] >= num_layers:
            raise ValueError(
                f"layer {self.layers[-1]} cannot score: the model has layers 0 to {num_layers - 1}"
            )
        for layer in self.layers:
            self.register_buffer(f"smoothing_{layer}", torch.empty(2, dtype=dtype, device=device))
            if self.scorer == "random":
                self.register_buffer(f"salt_{layer}", torch.empty(1, dtype=torch.int64, device=device))
        self.follow(config)

    def follow(self, config: EvictionConfig) -> None:
        """Take the numbers of another rule with the same scorer and layers."""
        self._config = config
        salt_L = uniform(torch.tensor(config.scorer_seed or 0), torch.tensor(self.layers)) * 2**30
        for scalars, salt in zip(self.by_layer().values(), salt_L.long(), strict=True):
            if scalars.salt is not None:
                scalars.salt.copy_(salt)
        self.smooth(None)

    def smooth(self, alpha: float | None) -> None:
        """Go on with another alpha, None for the rule's own."""
        self.alpha = self._config.alpha if alpha is None else alpha
        config = dataclasses.replace(self._config, alpha=self.alpha)
        numbers = zip(*layer_coefficients(config, len(self.layers)), strict=True)
        for of_layer, scalars in zip(numbers, self.by_layer().values(), strict=True):
            scalars.smoothing.copy_(torch.tensor(of_layer, dtype=torch.float64))

    def by_layer(self) -> dict[int, Coefficients]:
        """For each layer that scores."""
        names = Coefficients._fields if self.scorer == "random" else ("smoothing",)
        return {layer: Coefficients(*(getattr(self, f"{n}_{layer}") for n in names)) for layer in self.layers}


def updated(utility_BXN: Tensor, score_BXN: Tensor, scored_BXN: Tensor, smoothing: Tensor) -> Tensor:
    """The utilities after one layer's scores, where `scored_BXN` (bool) says so; elsewhere as they were."""
    decay, gain = smoothing.split(1)
    return torch.where(scored_BXN, decay * utility_BXN + gain * score_BXN, utility_BXN)
