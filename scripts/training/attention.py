"""A model's own attention, layer by layer, on a text that goes through it once.

Shape letters: B batch, T tokens, H query heads, G KV heads, D head dim, Q chosen queries, N keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Observe = Callable[[Tensor, Tensor, int | None, float], None]
"""Called in each layer with q_BHTD, k_BGTD, the window and the scale."""


class ObservedPass:
    """In the place of a cache, for a text that goes through the model in one piece: keeps nothing, attends
    causally, and hands each layer's queries and keys, after RoPE, to `observe`."""

    def __init__(self, observe: Observe) -> None:
        self.observe = observe

    def run_layer(self, index: int, layer: Callable[..., Tensor], x_BTE: Tensor, *args: Any) -> Tensor:
        return layer(x_BTE, *args, self)

    def attend(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int | None, scale: float
    ) -> Tensor:
        self.observe(q_BHTD, k_BGTD, window, scale)
        tokens = q_BHTD.shape[2]
        options: dict[str, Any] = {"scale": scale, "enable_gqa": True}
        if window is None or window >= tokens:
            return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, **options)
        seen_TT = visible(torch.arange(tokens, device=q_BHTD.device), tokens, window)
        return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, attn_mask=seen_TT, **options)


def visible(position_Q: Tensor, keys: int, window: int | None) -> Tensor:
    """Bool [Q, N]: the keys 0..N-1 that queries at these positions see."""
    age_QN = position_Q[:, None] - torch.arange(keys, device=position_Q.device)
    return (age_QN >= 0) if window is None else (age_QN >= 0) & (age_QN < window)


def log_attention(
    q_QHD: Tensor, k_GND: Tensor, position_Q: Tensor, window: int | None, scale: float
) -> Tensor:
    """The logarithm of each query's attention, averaged over query heads, [Q, N]; -inf where it sees
    nothing."""
    wide = torch.promote_types(torch.float32, k_GND.dtype)
    q_GXD = q_QHD.to(wide).unflatten(1, (len(k_GND), -1)).permute(1, 2, 0, 3).flatten(1, 2)
    logits_HQN = (q_GXD @ k_GND.to(wide).mT * scale).flatten(0, 1).unflatten(0, (-1, len(position_Q)))
    seen_QN = visible(position_Q, k_GND.shape[1], window)
    log_HQN = logits_HQN.masked_fill(~seen_QN, -torch.inf).log_softmax(-1)
    return log_HQN.logsumexp(0) - torch.tensor(len(log_HQN), dtype=wide).log()
