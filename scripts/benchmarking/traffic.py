"""What a decode step has to read, and to compute, by formula: what no implementation can do without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from inertiakv.model import Sizes
from inertiakv.models import ModelConfig, Transformer
from inertiakv.models.moe import Experts


def weight_bytes(model: Transformer, batch: int) -> int:
    """Weights that a step of `batch` rows reads, each once.

    All of them but an embedding table that is not the vocabulary head as well, of which a step looks up one
    line a row; and of a layer's experts as many as rows that choose theirs at random do in all.
    """
    return _weights(model, batch, lambda parameter: parameter.nbytes)


def kv_bytes(config: ModelConfig | Sizes, kept: Sequence[int], dtype: torch.dtype) -> int:
    """K and V of the kept tokens, in all layers: by formula, not as allocated."""
    token = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    return config.num_layers * sum(kept) * token


def step_bytes(model: Transformer, kept: Sequence[int]) -> int:
    """Bytes that a step of rows with `kept` tokens has to read: weights once, and K and V once."""
    return weight_bytes(model, len(kept)) + sum(row_bytes(model, n) for n in kept)


def row_bytes(model: Transformer, kept: int) -> int:
    """K and V that a row with `kept` tokens has to read, where a layer slides those of its window alone."""
    config = model.config
    token = 2 * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    return token * _seen(config, kept)


def step_flops(model: Transformer, kept: Sequence[int]) -> int:
    """Multiplications and additions of a step of rows with `kept` tokens: with the weights that a token
    needs, and of attention."""
    config, seen = model.config, sum(_seen(model.config, n) for n in kept)
    return 2 * len(kept) * active_weights(model) + 4 * config.num_heads * config.head_dim * seen


def active_weights(model: Transformer) -> int:
    """How many weights a token needs."""
    return _weights(model, 1, Tensor.numel)


def _seen(config: ModelConfig, kept: int) -> int:
    """Tokens that a query of a row with `kept` of them attends to, of all layers together."""
    return sum(kept if window is None else min(kept, window) for window in config.windows)


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
