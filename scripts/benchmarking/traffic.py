"""What a decode step must read and compute, by formula: the lower limit for any implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from inertiakv.model import Sizes
from inertiakv.models import ModelConfig, Transformer
from inertiakv.models.moe import Experts


def weight_bytes(model: Transformer, batch: int) -> int:
    """Weights that a step of `batch` rows reads, each once.

    An embedding table that is not the vocabulary head as well does not count, since a step looks up one line
    of it per row. Of a layer's experts count as many as the rows choose together on average, at random.
    """
    return _weights(model, batch, lambda parameter: parameter.nbytes)


def kv_bytes(config: ModelConfig | Sizes, kept: Sequence[int], dtype: torch.dtype) -> int:
    """K and V of the kept tokens in all layers: by formula, not as allocated."""
    token = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    return config.num_layers * sum(kept) * token


def step_bytes(model: Transformer, kept: Sequence[int]) -> int:
    """Bytes that a step of rows with `kept` tokens must read: weights once, and K and V once."""
    return weight_bytes(model, len(kept)) + sum(row_bytes(model, n) for n in kept)


def row_bytes(model: Transformer, kept: int) -> int:
    """K and V that a step reads for a row with `kept` tokens: in sliding layers those in the window alone."""
    config = model.config
    token = 2 * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    return token * sum(kept if window is None else min(kept, window) for window in config.windows)


def active_weights(model: Transformer) -> int:
    """How many weights a token is multiplied with."""
    return _weights(model, 1, Tensor.numel)


def _weights(model: Transformer, batch: int, size: Callable[[Tensor], int]) -> int:
    """The sizes of the weights that a step of `batch` rows needs."""

    def of(module: nn.Module) -> int:
        return sum(map(size, module.parameters()))

    total = of(model)
    if not model.config.tie_embeddings:
        total -= of(model.embed_tokens)
    moe = model.config.moe
    if moe is not None:
        idle = (1 - moe.top_k / moe.num_experts) ** batch  # the share of experts that no row has chosen
        total -= round(idle * sum(of(m) for m in model.modules() if isinstance(m, Experts)))
    return total
