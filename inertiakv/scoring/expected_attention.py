"""Expected attention: the attention that future queries are expected to pay (arXiv 2510.00636, as in
kvpress).

Queries before RoPE are modelled as a Gaussian with the mean and covariance of those seen. Rotated by the
mean rotation of the next positions, it gives the expectation of exp(q . k * scale) in closed form.

Shape letters: B batch, T queries, H query heads, G KV heads, R query heads of a KV head, N slots, D head dim,
P = D / 2 rotated pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..model import LanguageModel

FUTURE = 512
"""Positions from the next one on, over which the rotation is averaged."""
SINKS = 4
"""First positions, which all look at: left out of the mean, the covariance and the softmax."""


class Rotations(NamedTuple):
    """Cosines and sines of each pair (i, i + D / 2) of a head: of the queries seen, and the mean over
    future ones."""

    cos_BTP: Tensor
    sin_BTP: Tensor
    future_cos_BP: Tensor
    future_sin_BP: Tensor


def check_rotary(model: LanguageModel) -> None:
    """Raise ValueError for a model that does not offer its rotary tables."""
    if not callable(getattr(model, "rotary", None)):
        raise ValueError(
            "scorer='expected_attention' undoes the rotation of queries: it needs a model that offers "
            "`model.rotary(positions_BT, dtype) -> (cos_BTP, sin_BTP)`"
        )


def rotations(model: LanguageModel, positions_BT: Tensor, next_B: Tensor, dtype: torch.dtype) -> Rotations:
    """Of queries at these positions, and of those from `next_B` on, by the rotary tables of the model."""
    rotary = model.rotary  # type: ignore[attr-defined]
    future_BT = next_B[:, None] + torch.arange(FUTURE, device=next_B.device)
    (cos_BTP, sin_BTP), (later_cos_BTP, later_sin_BTP) = rotary(positions_BT, dtype), rotary(future_BT, dtype)
    return Rotations(cos_BTP, sin_BTP, later_cos_BTP.mean(1), later_sin_BTP.mean(1))


def expected_weights(
    q_BHTD: Tensor, query_BT: Tensor, rotations: Rotations, k_BGND: Tensor, position_BXN: Tensor, scale: float
) -> Tensor:
    """What later queries are expected to pay to each token, softmax over the tokens, mean over the heads of
    a KV head, [B, G, N]. `query_BT`: positions of the queries, -1 for padding."""
    dtype = rotations.cos_BTP.dtype
    mean_BHD, covariance_BHDD = _statistics(_as_future(q_BHTD.to(dtype), rotations), query_BT >= SINKS)
    k_BGND = k_BGND.to(dtype)
    counts_BXN = position_BXN >= SINKS
    total_BGN: Tensor | None = None
    heads = q_BHTD.shape[1] // k_BGND.shape[1]
    for head in range(heads):  # head by head: K in float32 is large
        mean_BGD1, covariance_BGDD = mean_BHD[:, head::heads, :, None], covariance_BHDD[:, head::heads]
        square_BGN = ((k_BGND @ covariance_BGDD) * k_BGND).sum(-1)
        logits_BGN = (k_BGND @ mean_BGD1)[..., 0] * scale + square_BGN * (scale * scale / 2)
        weights_BGN = torch.where(counts_BXN, logits_BGN, -torch.inf).softmax(-1)
        total_BGN = weights_BGN if total_BGN is None else total_BGN + weights_BGN
    assert total_BGN is not None
    return torch.where(counts_BXN.any(-1, keepdim=True), total_BGN / heads, 0.0)


def _as_future(q_BHTD: Tensor, r: Rotations) -> Tensor:
    """Queries with their own rotation undone and the mean future rotation applied."""
    length_B1TP = (r.cos_BTP.square() + r.sin_BTP.square())[:, None]  # not 1 where RoPE scales attention
    q_BHTD = _turn(q_BHTD, r.cos_BTP[:, None] / length_B1TP, -r.sin_BTP[:, None] / length_B1TP)
    return _turn(q_BHTD, r.future_cos_BP[:, None, None], r.future_sin_BP[:, None, None])


def _turn(x_BHTD: Tensor, cos_P: Tensor, sin_P: Tensor) -> Tensor:
    a_BHTP, b_BHTP = x_BHTD.chunk(2, dim=-1)
    return torch.cat((a_BHTP * cos_P - b_BHTP * sin_P, b_BHTP * cos_P + a_BHTP * sin_P), dim=-1)


def _statistics(q_BHTD: Tensor, real_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the real queries, 0 where there are none."""
    real_B1T1 = real_BT[:, None, :, None]
    number_B111 = real_B1T1.sum(2, keepdim=True).clamp_min(1)
    mean_BH1D = torch.where(real_B1T1, q_BHTD, 0.0).sum(2, keepdim=True) / number_B111
    apart_BHTD = torch.where(real_B1T1, q_BHTD - mean_BH1D, 0.0)
    return mean_BH1D[:, :, 0], apart_BHTD.mT @ apart_BHTD / number_B111
