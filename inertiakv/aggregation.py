"""From scores to utilities: every rule of the paper as one recurrence over layers.

Shape letters: B batch, L layers, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import EvictionConfig


def layer_coefficients(config: EvictionConfig, num_layers: int) -> tuple[list[float], list[float]]:
    """`decay` and `gain`, one a layer: after layer l, `m = decay[l] * m + gain[l] * score[l]`.

    The EMA of the paper is decay alpha, gain 1 - alpha in every layer, so that alpha weights layers
    and remembers steps at once. The other couplings are written out as an EMA over steps of a weighted mean
    over layers: the first layer decays the utility by the memory `a`, and every layer adds its share of 1 -
    a.
    """
    if config.aggregation == "cumulative":
        return [1.0] * num_layers, [1.0] * num_layers
    alpha = 0.0 if config.alpha is None else config.alpha
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


class Aggregation(nn.Module):
    """The recurrence's coefficients as buffers: a graph reads them, so that another alpha is no recompile."""

    decay_L: Tensor
    gain_L: Tensor

    def __init__(
        self, config: EvictionConfig, num_layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        decay, gain = layer_coefficients(config, num_layers)
        self.register_buffer("decay_L", torch.tensor(decay, dtype=dtype, device=device))
        self.register_buffer("gain_L", torch.tensor(gain, dtype=dtype, device=device))

    def by_layer(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's decay and gain, as scalars. Copies, since the compiler takes layers for alike only
        where their inputs lie alike, and views of one buffer do not."""
        return [(decay.clone(), gain.clone()) for decay, gain in zip(self.decay_L, self.gain_L, strict=True)]


def updated(utility_BN: Tensor, score_BN: Tensor, scored_BN: Tensor, decay: Tensor, gain: Tensor) -> Tensor:
    """The utilities after one layer's scores, where `scored_BN` (bool) says so; elsewhere as they were."""
    return torch.where(scored_BN, decay * utility_BN + gain * score_BN, utility_BN)
