"""The layers that every family shares.

Shapes: B batch, T query tokens, H query heads, G KV heads, D head dim, E hidden size, I and O inputs and
outputs of a linear layer (a part of the outputs, in S streams), R its rows, in P passes of Q.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel
from inertiakv.compiling.numerics import materialize

from .config import ModelConfig
from .rope import rotate

Rotation = tuple[Tensor, Tensor]

FEW_ROWS = 8
"""Up to so many rows a compiled linear layer on a CPU is a loop of the compiler's own."""
SIDES = 16
"""Parts of its outputs that an uncompiled linear layer for one row computes side by side on a CPU."""
LOADS_BYTES = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether the compiler's loops load int8 as it is, and not by way of the stack, which takes eight times as
long as to compute with it."""


class Cache(Protocol):
    """All that a model asks of a cache."""

    def run_layer(self, index: int, layer: Callable[..., Tensor], x_BTE: Tensor, rotary: Rotation) -> Tensor:
        """`layer(x_BTE, rotary, view)` with the view of layer `index`."""
        ...


class LayerView(Protocol):
    """All that a layer asks of its view of the cache."""

    def attend(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int | None, scale: float
    ) -> Tensor:
        """Writes k and v, attends over everything visible and returns the output [B, H, T, D]."""
        ...


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, norms and softmax: float32, float64 for a float64 model."""
    return torch.promote_types(torch.float32, dtype)


def empty(*shape: int) -> nn.Parameter:
    """A parameter without gradient, to be filled from a checkpoint."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, scale_O1: Tensor | None = None
) -> Tensor:
    """x [..., I] -> [..., O] in x's dtype. With a scale the weights are quantised: `weight_OI * scale_O1`."""
    rows = x.numel() // x.shape[-1]
    if scale_O1 is not None and 0 < rows <= FEW_ROWS and library_reads_int8(x):
        y_RO = int8_product(x.reshape(rows, -1), weight_OI, scale_O1)
        return (y_RO if bias_O is None else y_RO + bias_O).reshape(*x.shape[:-1], -1)
    # Other products of a library do not take quantised weights as they are: the compiler's loop does.
    own_loop = x.device.type == "cpu" or scale_O1 is not None
    if not (torch.compiler.is_compiling() and own_loop and rows <= FEW_ROWS):
        # First narrow, then scaled: a product of two numbers of x's dtype, rounded once, and no wider copy.
        weight_OI = weight_OI if scale_O1 is None else weight_OI.to(x.dtype) * scale_O1
        if rows == 1 and x.device.type == "cpu" and x.dtype.itemsize >= 4 and weight_OI.shape[0] % SIDES == 0:
            y_O = one_row_product(x.reshape(-1), weight_OI)
            return (y_O if bias_O is None else y_O + bias_O).reshape(*x.shape[:-1], -1)
        return F.linear(x, weight_OI, bias_O)
    y_RO = few_rows_product(x.reshape(rows, -1), weight_OI)
    y_RO = y_RO if scale_O1 is None else y_RO * scale_O1[:, 0]
    y_RO = y_RO if bias_O is None else y_RO + bias_O
    return y_RO.to(x.dtype).reshape(*x.shape[:-1], -1)


def library_reads_int8(x: Tensor) -> bool:
    """Whether to multiply few rows by int8 weights with the library's product for that, of CPUs: uncompiled,
    and where the compiler's loop is slow. It reads 32 inputs at a time, be there as many or not."""
    fits = x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.shape[-1] % 32 == 0
    return fits and not (torch.compiler.is_compiling() and LOADS_BYTES)


def int8_product(x_RI: Tensor, weight_OI: Tensor, scale_O1: Tensor) -> Tensor:
    """weight_OI times x_RI, [R, O], by the library, which checks neither strides of scales nor where x
    begins: it takes the process down where that is not at a whole vector."""
    x_RI = x_RI.contiguous()
    if not torch.compiler.is_compiling() and x_RI.data_ptr() % 64:
        x_RI = x_RI.clone()
    return torch._weight_int8pack_mm(x_RI, weight_OI, scale_O1[:, 0].contiguous())


def one_row_product(x_I: Tensor, weight_OI: Tensor) -> Tensor:
    """weight_OI times x_I, [O], of float32 or wider on a CPU. The library's product of a matrix and a vector
    runs on one core; several of them run side by side. With the vector on the right they would take three
    times as long."""
    parts_S = weight_OI.unflatten(0, (SIDES, -1))
    return torch.bmm(x_I.expand(SIDES, 1, -1), parts_S.mT).flatten()


def few_rows_product(x_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """x_RI times weight_OI transposed, [R, O] in the dtype of statistics, as products and sums.

    Few rows are bound by reading the weights, which the compiler's own loop does up to twice as fast as the
    library's matrix product. The loop has up to four sums side by side: of as many rows, since weights that
    have been read serve them all, and with fewer rows of outputs that lie far apart, since a core reads
    several streams faster than one. A second pass over the rows finds the weights in the innermost cache, is
    bound by arithmetic, and has up to eight sums where each is one register (of weights of 16 bits it is
    two). All that is about cores: elsewhere each output is summed once for all rows.
    """
    rows, outputs = x_RI.shape[0], weight_OI.shape[0]
    cores = x_RI.device.type == "cpu"
    passes = 2 if cores and rows > 4 and rows % 2 == 0 else 1
    together = 8 if passes > 1 and weight_OI.dtype.itemsize != 2 else 4
    streams = max(1, together * passes // rows) if cores else 1
    streams = streams if outputs % streams == 0 else 1
    wide = statistics_dtype(x_RI.dtype)
    x_PQI = materialize(x_RI.to(wide)).unflatten(0, (passes, -1))
    weight_SO1I = weight_OI.to(wide).unflatten(0, (streams, -1))[:, :, None]
    sums = [(weight_O1I * x_PI).sum(-1) for weight_O1I in weight_SO1I.unbind() for x_PI in x_PQI.unbind(1)]
    y_SQOP = torch.stack(sums).unflatten(0, (streams, -1))
    y_RO = y_SQOP.permute(3, 1, 0, 2).flatten(2).flatten(0, 1)
    # Two passes leave the outputs of two rows in turns: an activation would be computed one at a time.
    return y_RO if passes == 1 else materialize(y_RO)


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty(outputs, inputs)
        self.bias = empty(outputs) if bias else None
        self.scale: nn.Parameter | None = None  # of quantised weights (quantize.py)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.scale)


class Embedding(nn.Module):
    """Of the vocabulary, of which each rank holds as many rows, in order."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel = SINGLE_PROCESS) -> None:
        super().__init__()
        self.tp = tp
        self.weight = empty(vocab_size // tp.size, hidden_size)
        self.scale: nn.Parameter | None = None  # of quantised weights (quantize.py)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self._rows(tokens_BT)
        row_BT, rows = tokens_BT - self.tp.rank * len(self.weight), len(self.weight)
        mine_BT1 = ((row_BT >= 0) & (row_BT < rows))[..., None]
        # One rank's row and zeros: the sum is exact.
        return self.tp.sum(torch.where(mine_BT1, self._rows(row_BT.clamp(0, rows - 1)), 0.0))

    def _rows(self, row_BT: Tensor) -> Tensor:
        x_BTE = F.embedding(row_BT, self.weight)
        return x_BTE if self.scale is None else x_BTE * F.embedding(row_BT, self.scale)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(statistics_dtype(x.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.window = config.windows[index]
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = Linear(queries, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BTE: Tensor, rotary: Rotation, view: LayerView) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_dim))

        q_BHTD = rotate(self.q_norm(heads(self.q_proj(x_BTE))).transpose(1, 2), rotary)
        k_BGTD = rotate(self.k_norm(heads(self.k_proj(x_BTE))).transpose(1, 2), rotary)
        v_BGTD = heads(self.v_proj(x_BTE)).transpose(1, 2)
        out_BHTD = view.attend(q_BHTD, k_BGTD, v_BGTD, window=self.window, scale=self.scale)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x_BTE: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTE)) * self.up_proj(x_BTE))
