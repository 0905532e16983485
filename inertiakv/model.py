"""What the method asks of a model. `models.Transformer` is one; any module that offers this can be decoded.

Shape letters: B batch, T query tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

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


class LanguageModel(Protocol):
    """A decoder-only model that leaves attention to a cache: in every layer, after RoPE, it calls
    `view.attend(q_BHTD, k_BGTD, v_BGTD, window=..., scale=...)` and goes on with what that returns.

    It runs its layers as `cache.run_layer(index, layer, x_BTE, *args)`, which calls `layer(x_BTE, *args,
    view)` with the view to say `attend` to. Layers that are alike are traced and compiled once: a layer's
    code, its index say, should not depend on which one it is. It knows nothing else of the cache.

    A model that several processes hold together says so by an attribute `ranks` (see ranks.py). The sizes in
    its `config` are those of its own heads then; its hidden states and logits are the same in all of them.
    """

    @property
    def config(self) -> Sizes: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def __call__(self, tokens_BT: Tensor, positions_BT: Tensor, cache: Any) -> Tensor:
        """Hidden states after the final norm, [B, T, E]. A padding token has position -1."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits, [..., E] to [..., V]."""
        ...
