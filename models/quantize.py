"""Weight-only int8 quantization of linear layers, with one scale for each row of a matrix.

It halves the bytes of bfloat16 weights, and so the bytes that a decode step reads. Activations, norms and the
KV cache keep the model's dtype. The embedding is quantized only if it is the vocabulary head as well.

Shapes: O and I rows and columns of a matrix.
"""

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel

from .extras import install
from .layers import Embedding, Linear
from .transformer import Transformer

QUANTIZED = ("int8",)
_AT_ONCE = 2**25
"""Weights that are quantized at once, which bounds the memory for their float32 copies."""


def check_quantize(quantize: str | None) -> None:
    """Raises ValueError for an unknown quantization, or if torchao is not installed."""
    if quantize is None:
        return
    if quantize not in QUANTIZED:
        raise ValueError(f"quantize {quantize!r} is not supported; supported: None, {', '.join(QUANTIZED)}")
    _torchao()


def make_room(model: Transformer) -> None:
    """Gives a model on the meta device int8 matrices, with scales in the model's dtype. Raises ValueError for
    a mixture of experts."""
    if model.config.moe is not None:
        raise ValueError("quantize: the experts of a mixture are not quantized; load it without")
    for matrix in _matrices(model):
        rows, device = matrix.weight.shape[0], matrix.weight.device
        scale_O1 = torch.empty(rows, 1, dtype=model.dtype, device=device)
        matrix.weight = nn.Parameter(matrix.weight.to(torch.int8), requires_grad=False)
        matrix.scale = nn.Parameter(scale_O1, requires_grad=False)


def quantize_into(
    source_OI: Tensor, weight_OI: Tensor, scale_O1: Tensor, tp: TensorParallel = SINGLE_PROCESS
) -> None:
    """Quantizes a matrix into `weight_OI` and `scale_O1`, on their device. If the columns of the matrix are
    split over a group `tp`, the scale of a row is that of the whole row."""
    ao = _torchao()
    columns = source_OI.shape[1]
    rows = max(1, _AT_ONCE // columns)
    for source, weight, scale in zip(*(t.split(rows) for t in (source_OI, weight_OI, scale_O1)), strict=True):
        values = source.to(weight.device, torch.float32)
        # The scale of a row depends on its minimum and maximum only.
        ends_O2 = tp.gather(torch.stack(values.aminmax(dim=1), dim=1))
        block, eps = (1, ends_O2.shape[1]), torch.finfo(torch.float32).eps
        chosen, zero = ao.choose_qparams_affine(ends_O2, ao.MappingType.SYMMETRIC, block, torch.int8, eps=eps)
        # The scale is rounded to its dtype first, and the weights are rounded for that scale.
        scale.copy_(chosen[:, None])
        rounded_O = scale[:, 0].to(torch.float32)
        weight.copy_(ao.quantize_affine(values, (1, columns), rounded_O, zero, torch.int8))


def _matrices(model: Transformer) -> Iterator[Linear | Embedding]:
    yield from (module for module in model.modules() if isinstance(module, Linear))
    if model.config.tie_embeddings:
        yield model.embed_tokens


def _torchao() -> Any:
    """torchao's quantization primitives, imported without its warnings about GPU kernels."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module("torchao.quantization.quant_primitives")
    except ImportError as error:
        raise ValueError(f"quantize needs torchao: {install('quant')} ({error})") from error
    finally:
        logging.disable(before)
