"""Scorers: one small pure function each.

A score is made for every KV head, [B, G, N], or once for all of them, [B, 1, N]; a retention set that several
heads share takes the mean of theirs. Scores are float32, or float64 for a float64 model.

Shape letters: B batch, G KV heads, R queries of one KV head (its query heads, times the queries where several
score together), T these queries, H query heads, N slots, D head dim, X retention sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.forward_state import ForwardState
from ..cache.retention import EMPTY
from ..compiling.collectives import SINGLE_PROCESS, TensorParallel
from ..compiling.numerics import accumulation_dtype, uniform
from ..config import ScorerName
from .expected_attention import SINKS, expected_weights


class Evidence(NamedTuple):
    """What a scorer sees of one layer. Scores of empty slots mean nothing and need only not be NaN."""

    state: ForwardState
    """Of the pass: positions of queries and slots, and what single scorers need."""
    q_BHTD: Tensor
    """All queries that score together."""
    k_BGND: Tensor
    v_BGND: Tensor
    scale: float
    """Of the logits."""
    weights_BGRN: Tensor | None = None
    """Softmax attention, for the scorers in `config.OF_ATTENTION`; 0 in empty slots and for padding."""
    salt: Tensor | None = None
    """Of the layer, for `random`."""

    @property
    def query_BT(self) -> Tensor:
        """Positions of the queries, -1 for padding; the last one is the newest."""
        return self.state.query_BT

    @property
    def position_BXN(self) -> Tensor:
        """The position in each slot, -1 where it is empty."""
        assert self.state.position_BXN is not None
        return self.state.position_BXN

    @property
    def occupied_BXN(self) -> Tensor:
        return self.position_BXN > EMPTY

    @property
    def real_share_B(self) -> Tensor | None:
        """Share of the queries that are no padding; None for a single query, which never is."""
        if self.query_BT.shape[1] == 1:
            return None
        return (self.query_BT > EMPTY).to(accumulation_dtype(self.k_BGND.dtype)).mean(-1)

    @property
    def q_BHD(self) -> Tensor:
        """The query; the mean of several that score together."""
        share_B = self.real_share_B
        if share_B is None:
            return self.q_BHTD[:, :, 0]
        real_B1T1 = (self.query_BT > EMPTY)[:, None, :, None]
        return torch.where(real_B1T1, self.q_BHTD, 0.0).mean(2) / share_B[:, None, None]

    @property
    def weights(self) -> Tensor:
        assert self.weights_BGRN is not None, "this scorer is not among those of config.OF_ATTENTION"
        return self.weights_BGRN

    def mean(self, x_BGR: Tensor, tp: TensorParallel = SINGLE_PROCESS) -> Tensor:
        """Mean over the queries of a KV head: [B, G, R, ...] to [B, G, ...], where padding has 0. With
        `window_by="max"` the mean over query heads (of all ranks of `tp`), then the maximum over queries."""
        queries = self.q_BHTD.shape[2]
        if self.state.window_by == "max" and queries > 1:
            return tp.mean(x_BGR.unflatten(2, (-1, queries)).mean(2)).amax(2)
        mean_BG, share_B = x_BGR.mean(2), self.real_share_B
        if share_B is None:
            return mean_BG
        return mean_BG / share_B.clamp_min(_TINY).view(-1, *[1] * (mean_BG.dim() - 1))


def attention(e: Evidence) -> Tensor:
    """Mean over query heads of the attention on each token (arXiv 2609.03515, the default; TOVA, H2O, SnapKV
    use it, too)."""
    if e.occupied_BXN.shape[1] == 1:  # of all heads at once, which is one kernel with what follows
        return e.mean(e.weights.flatten(1, 2)[:, None], e.state.tp)
    return e.mean(e.weights)


def value_norm(e: Evidence) -> Tensor:
    """Attention times the norm of the token's value, over the mean norm in its head (arXiv 2609.03515; VATP,
    arXiv 2406.12335)."""
    norm_BGN = _norm(e.v_BGND)
    return e.mean(e.weights) * (norm_BGN / _mean_occupied(norm_BGN, e.occupied_BXN))


def entropy(e: Evidence) -> Tensor:
    """Attention times the layer's mean entropy over log n, a scalar (arXiv 2609.03515)."""
    weights = e.weights
    entropy_BGR = -torch.xlogy(weights, weights).sum(-1)
    number_BX = e.occupied_BXN.sum(-1).clamp_min(2).to(weights.dtype)
    share_BGR = entropy_BGR / number_BX.log()[..., None]
    return attention(e) * e.mean(share_BGR).mean(1)[:, None, None]


def above_mean(e: Evidence) -> Tensor:
    """Share of query heads whose attention on the token is above the mean, 1 / n: summed over steps, how long
    its importance persists (Scissorhands, arXiv 2305.17118)."""
    number_BX1 = e.occupied_BXN.sum(-1, keepdim=True).clamp_min(1)
    mean_BX11 = (1 / number_BX1.to(e.weights.dtype))[..., None]
    return e.mean((e.weights > mean_BX11).to(e.weights.dtype))


def keydiff(e: Evidence) -> Tensor:
    """Minus the cosine between the key and the mean of the normalised keys of its head (KeyDiff, arXiv
    2504.15364)."""
    k_BGND = e.k_BGND.to(accumulation_dtype(e.k_BGND.dtype))
    unit_BGND = k_BGND / _norm(k_BGND).clamp_min(_TINY)[..., None]
    occupied_BXN1 = e.occupied_BXN[..., None]
    mean_BG1D = torch.where(occupied_BXN1, unit_BGND, 0.0).sum(2, keepdim=True) / occupied_BXN1.sum(
        2, keepdim=True
    ).clamp_min(1)
    cosine_BGN = (unit_BGND * mean_BG1D).sum(-1) / _norm(mean_BG1D).clamp_min(_TINY)
    return torch.where(e.occupied_BXN, -cosine_BGN, 0.0)


def key_norm(e: Evidence) -> Tensor:
    """Minus the norm of the key: small keys draw attention (arXiv 2406.11430).

    In the first layer equal tokens have equal norms up to rounding, which differs with the batch. The norm
    is cut to 14 bits, so that age decides between them.
    """
    return -torch.where(e.occupied_BXN, _cut(_norm(e.k_BGND)), 0.0)


def recency(e: Evidence) -> Tensor:
    """The position."""
    return e.position_BXN.to(accumulation_dtype(e.k_BGND.dtype))


def random(e: Evidence) -> Tensor:
    """Uniform in [0, 1), by a hash of the layer, the query's position and the token's: no draw depends on the
    batch or on the slot."""
    assert e.salt is not None
    heads = torch.arange(e.position_BXN.shape[1], device=e.salt.device)[:, None]
    seed_BXN = (e.salt + heads) * (1 << 32) + e.query_BT[:, -1, None, None]
    return uniform(seed_BXN, e.position_BXN.long()).to(accumulation_dtype(e.k_BGND.dtype))


def learned(e: Evidence) -> Tensor:
    """A bilinear form of query and key that was trained to predict attention (arXiv 2609.03515)."""
    assert e.state.learned is not None
    return torch.where(e.occupied_BXN, e.state.learned.score(e.q_BHD, e.k_BGND)[:, None], 0.0)


def expected_attention(e: Evidence) -> Tensor:
    """The attention expected of later queries times the norm of the value; the first tokens, which the
    expectation leaves out, are worth as much as the best (arXiv 2510.00636).

    As in kvpress, the norm is that of v and not of W_o v, and no epsilon is added to the attention. The paper
    takes its statistics from all of the prompt's queries, here they are those that score together.
    """
    assert e.state.rotations is not None
    args = (e.q_BHTD, e.query_BT, e.state.rotations, e.k_BGND, e.position_BXN, e.scale)
    score_BGN = torch.where(e.occupied_BXN, expected_weights(*args) * _norm(e.v_BGND), 0.0)
    return torch.where(e.position_BXN < SINKS, score_BGN.amax(-1, keepdim=True), score_BGN)


# `reconstruction` scores with a pass of its own, in kvzip.py.
SCORERS: dict[ScorerName, Callable[[Evidence], Tensor]] = {
    "attention": attention,
    "value_norm": value_norm,
    "entropy": entropy,
    "above_mean": above_mean,
    "keydiff": keydiff,
    "key_norm": key_norm,
    "recency": recency,
    "random": random,
    "learned": learned,
    "expected_attention": expected_attention,
}


def by_set(score: Tensor, sets: int) -> Tensor:
    """Scores of heads, or of all heads, as those of a layer's retention sets, [B, X, N]."""
    return score if score.shape[1] == sets else score.mean(1, keepdim=True).expand(-1, sets, -1)


_TINY = math.ulp(0.0) ** 0.1  # about 1e-32: far below any key's norm, and a float32


def _norm(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype)).square().sum(-1).sqrt()


def _cut(x: Tensor) -> Tensor:
    """The first 14 bits of positive numbers, behind the leading one."""
    return (x.float().view(torch.int32) & -(1 << 9)).view(torch.float32).to(x.dtype)


def _mean_occupied(x_BGN: Tensor, occupied_BXN: Tensor) -> Tensor:
    total_BG1 = torch.where(occupied_BXN, x_BGN, 0.0).sum(-1, keepdim=True)
    return (total_BG1 / occupied_BXN.sum(-1, keepdim=True).clamp_min(1)).clamp_min(_TINY)
