"""Mixture of experts: a router, and the experts' matrices stacked into two tensors.

Shapes: N tokens (B * T), X experts, K experts a token, R = N * K token-expert pairs, E hidden size, F expert
intermediate size, I and O a matrix product's inputs and outputs.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inertiakv.compiling.numerics import accumulation_dtype

from .family import MoEConfig
from .layers import Linear, empty

Product = Callable[[Tensor, Tensor], Tensor]


class SparseMLP(nn.Module):
    """Each token goes through its K most probable experts; no other expert's weights are read."""

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__()
        self.top_k = moe.top_k
        self.normalise = moe.normalise
        self.gate = Linear(hidden_size, moe.num_experts)
        self.experts = Experts(hidden_size, moe)

    def forward(self, x_BTE: Tensor) -> Tensor:
        x_NE = x_BTE.flatten(0, 1)
        weight_NX = torch.softmax(self.gate(x_NE), dim=-1, dtype=accumulation_dtype(x_NE.dtype))
        weight_NK, expert_NK = weight_NX.topk(self.top_k, dim=-1)
        if self.normalise:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        y_NKE = self.experts(x_NE, expert_NK)
        y_NE = (y_NKE * weight_NK[..., None]).sum(1).to(x_NE.dtype)
        return y_NE.reshape(x_BTE.shape)


class Experts(nn.Module):
    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__()
        self.gate_up_XOI = empty(moe.num_experts, 2 * moe.intermediate_size, hidden_size)
        self.down_XOI = empty(moe.num_experts, hidden_size, moe.intermediate_size)

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """The name of every expert's tensor in a checkpoint, and the part of a stacked parameter it fills."""
        for index, (gate_up_OI, down_OI) in enumerate(zip(self.gate_up_XOI, self.down_XOI, strict=True)):
            gate_OI, up_OI = gate_up_OI.chunk(2)
            yield f"{index}.gate_proj.weight", gate_OI
            yield f"{index}.up_proj.weight", up_OI
            yield f"{index}.down_proj.weight", down_OI

    def forward(self, x_NE: Tensor, expert_NK: Tensor) -> Tensor:
        """Output of each chosen expert, unweighted: [N, K, E] in `accumulation_dtype`."""
        (tokens, top_k), experts = expert_NK.shape, self.down_XOI.shape[0]
        expert_R = expert_NK.flatten()
        if torch.compiler.is_compiling() and tokens * top_k <= experts:
            # Indexing and sum fuse into one loop: only the chosen experts are read, and nothing is copied.
            x_RE = x_NE.repeat_interleave(top_k, 0)
            y_RE = self._mlp(x_RE, lambda x_RI, weight_XOI: _chosen(x_RI, weight_XOI, expert_R))
        else:
            order_R = expert_R.argsort(stable=True)
            # Counting with searchsorted keeps shapes static, unlike torch.bincount.
            ids_X = torch.arange(experts, device=expert_R.device)
            end_X = torch.searchsorted(expert_R[order_R], ids_X, right=True).to(torch.int32)
            sorted_RE = self._mlp(
                x_NE[order_R // top_k], lambda x_RI, weight_XOI: _grouped(x_RI, weight_XOI, end_X)
            )
            y_RE = torch.empty_like(sorted_RE).index_copy_(0, order_R, sorted_RE)
        return y_RE.view(tokens, top_k, -1).to(accumulation_dtype(x_NE.dtype))

    def _mlp(self, x_RE: Tensor, product: Product) -> Tensor:
        gate_RF, up_RF = product(x_RE, self.gate_up_XOI).chunk(2, dim=-1)
        return product((F.silu(gate_RF) * up_RF).to(x_RE.dtype), self.down_XOI)


def _chosen(x_RI: Tensor, weight_XOI: Tensor, expert_R: Tensor) -> Tensor:
    """Row r times the matrix of its own expert: [R, O] in `accumulation_dtype`."""
    return (weight_XOI[expert_R] * x_RI[:, None]).sum(-1, dtype=accumulation_dtype(x_RI.dtype))


# A custom operator, opaque to the compiler: that supports the library's grouped product in bfloat16 only, and
# the loop below has lengths that depend on data.
@torch.library.custom_op("inertiakv_models::grouped_product", mutates_args=())
def _grouped(x_RI: Tensor, weight_XOI: Tensor, end_X: Tensor) -> Tensor:
    """Rows sorted by expert times their experts' matrices: [R, O]. The rows of expert x end at end_X[x]."""
    aligned = all(size * x_RI.element_size() % 16 == 0 for size in weight_XOI.shape[1:])
    if x_RI.dtype != torch.float64 and aligned:
        return F.grouped_mm(x_RI, weight_XOI.mT, offs=end_X)
    # The grouped product supports neither float64 nor rows that are no multiple of 16 bytes.
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_XOI.shape[1])
    start = 0
    for expert, end in enumerate(end_X.tolist()):
        torch.mm(x_RI[start:end], weight_XOI[expert].mT, out=y_RO[start:end])
        start = end
    return y_RO


@_grouped.register_fake
def _(x_RI: Tensor, weight_XOI: Tensor, end_X: Tensor) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight_XOI.shape[1])
