"""Token scores: one small pure function a scorer.

Shape letters: B batch, G KV heads, R query heads of one KV head (H = G * R), N slots.
"""

from __future__ import annotations

from torch import Tensor


def attention(weights_BGRN: Tensor) -> Tensor:
    """Mean over query heads of the step's attention on each token, score_BN (the default of the paper)."""
    return weights_BGRN.mean((1, 2))
