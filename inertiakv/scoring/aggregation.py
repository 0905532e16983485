"""From scores to utilities: every rule of the paper as one recurrence over layers.

Shape letters: B batch, X retention sets, L layers, N slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..config import EvictionConfig


def layer_coefficients(config: EvictionConfig, num_layers: int) -> tuple[list[float], list[float]]:
    """`decay` and `gain`, one for each layer that scores: after layer l, `m = decay[l] * m + gain[l] *
    score[l]`.

    The paper's EMA has decay alpha and gain 1 - alpha in every layer, so alpha weights layers and remembers
    steps at once. The other couplings are an EMA over steps of a weighted mean over layers: the first layer
    decays the utility by the memory `a`, and every layer adds its share of 1 - a. With a retention set for
    each layer there is no recurrence over layers, and `a` is alpha.
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
    """Of one layer: decay and gain of the recurrence, [2], and the seed of random scores, [1]."""

    smoothing: Tensor
    salt: Tensor | None = None


def updated(utility_BXN: Tensor, score_BXN: Tensor, scored_BXN: Tensor, smoothing: Tensor) -> Tensor:
    """The utilities after one layer's scores; unchanged where `scored_BXN` (bool) is False."""
    decay, gain = smoothing.split(1)
    return torch.where(scored_BXN, decay * utility_BXN + gain * score_BXN, utility_BXN)
