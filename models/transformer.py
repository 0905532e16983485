"""The decoder of all families: embedding, layers, final norm, vocabulary head.

Shapes: B batch, T query tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from inertiakv.compiling.collectives import SINGLE_PROCESS, TensorParallel
from inertiakv.compiling.numerics import accumulation_dtype

from .config import ModelConfig
from .layers import MLP, Attention, Embedding, Linear, RMSNorm, Rotation, linear
from .moe import SparseMLP
from .parallel import share
from .rope import Rotary

if TYPE_CHECKING:
    from inertiakv.model import ForwardPass, LayerPass


class DecoderLayer(nn.Module):
    """Attention and MLP hold this process's part of the weights; what they add to the hidden state is summed
    over the group."""

    def __init__(self, config: ModelConfig, index: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.moe is not None and config.moe.sparse[index]:
            self.mlp: nn.Module = SparseMLP(config.hidden_size, config.moe)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x_BTE: Tensor, rotary: Rotation, layer_pass: LayerPass) -> Tensor:
        x_BTE = x_BTE + self.tp.sum(self.self_attn(self.input_layernorm(x_BTE), rotary, layer_pass))
        return x_BTE + self.tp.sum(self.mlp(self.post_attention_layernorm(x_BTE)))


class Transformer(nn.Module):
    """A language model for decoding only. Its modules are named as the tensors of a checkpoint are.

    The parameters are not initialised: fill them from a checkpoint (`load_checkpoint`) or yourself.

    In a tensor-parallel group it is this process's part of the model, and so are the sizes in `config` except
    `vocab_size` (see parallel.py). Raises ValueError if the sizes do not divide evenly.
    """

    source = "made in memory"
    substituted = False  # other weights than those that were asked for
    bytes_read = 0  # of a checkpoint, by this process
    apart_from_graphs = ("source", "substituted", "bytes_read")

    def __init__(self, config: ModelConfig, tp: TensorParallel = SINGLE_PROCESS) -> None:
        super().__init__()
        config, tp = share(config, tp)
        self.config, self.tp = config, tp
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, tp)
        self.rotary = Rotary(config.rope, config.head_dim)
        self.layers = nn.ModuleList(DecoderLayer(config, index, tp) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        rows = config.vocab_size // tp.size
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, rows)
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype  # of what is never quantised

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, forward_pass: ForwardPass) -> Tensor:
        """Hidden states after the final norm, [B, T, E] in the model's dtype.

        tokens_BT, positions_BT: int64 [B, T]. Positions count from the beginning of the sequence, whatever
        has been evicted; a padding token has position -1, and its hidden state is meaningless.
        """
        x_BTE = self.embed_tokens(tokens_BT)
        rotary = self.rotary(positions_BT, accumulation_dtype(x_BTE.dtype))
        for index, layer in enumerate(self.layers):
            x_BTE = forward_pass.run_layer(index, layer, x_BTE, rotary)
        return self.norm(x_BTE)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states: [..., E] -> [..., V] in the model's dtype."""
        matrix = self.lm_head or self.embed_tokens
        return self.tp.gather(linear(hidden, matrix.weight, scale_O1=matrix.scale))
