"""What the core asks of a model. `inertiakv.models.Transformer` is one; any module that offers this can be
decoded.

Shape letters: B batch, T query tokens, E hidden size, V vocabulary, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Sizes(Protocol):
    """The sizes of a model. `windows` has one entry a layer, None for full attention."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class LayerPass(Protocol):
    """What a layer attends through."""

    def attend(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int | None, scale: float
    ) -> Tensor:
        """Caches K and V (after RoPE), attends over everything visible, [B, H, T, D]."""
        ...


class ForwardPass(Protocol):
    """What a model runs its layers with."""

    def run_layer(self, index: int, layer: Callable[..., Tensor], x_BTE: Tensor, *args: Any) -> Tensor:
        """`layer(x_BTE, *args, layer_pass)`. Layers that are alike are traced and compiled once: a layer's
        code, its index say, should not depend on which one it is."""
        ...


class LanguageModel(Protocol):
    """A decoder-only model that leaves attention to the cache.

    A model that several processes hold together has an attribute `tp` (a `TensorParallel`). The sizes in its
    `config` are then those of its own heads; hidden states and logits are the same in all processes.
    """

    @property
    def config(self) -> Sizes: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def __call__(self, tokens_BT: Tensor, positions_BT: Tensor, forward_pass: Any) -> Tensor:
        """Hidden states after the final norm, [B, T, E]. A padding token has position -1."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits, [..., E] to [..., V]."""
        ...
