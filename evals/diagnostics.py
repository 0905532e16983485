"""Statistics of a recorded run: how stable the retention sets are, and which scores and layers decide them.

They are those of Table 13 of InertiaKV (arXiv 2609.03515), which finds at 90 % compression: raw top-B churn
34 %, EMA churn 8 %, at most one token changed in 75 % of the steps; between attention, value norm and entropy
as scorers a Spearman correlation and a mean pairwise Jaccard of 0.97, with KeyDiff 0.49 and 0.38.

*Raw* is the mean over layers of a step's scores, *EMA* the utility that the rule makes of them, whatever its
aggregation. Sets are the top B of all tokens that the step could see, so record a run that keeps every token:
one that evicts sees no more than B + 1. `retained_sets` are what a rule would retain of such a run,
`cached_sets` what a run that evicts did retain. An undefined statistic (of one step alone, of scores that are
no distribution) is NaN.

Shape letters: T decode steps, B batch, L layers, N slots, P positions. `budget` is the size of a set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inertiakv.cache.retention import EMPTY
from inertiakv.config import EvictionConfig
from inertiakv.decoding.recording import Recording
from inertiakv.eviction.protection import Limits, protected
from inertiakv.scoring.aggregation import layer_coefficients


@dataclass(frozen=True)
class RowTrace:
    """One row of a recording by position, up to the step where the row ended."""

    utility_TP: Tensor
    """After the step's update, before its eviction; NaN for tokens that the step did not attend to."""
    score_TLP: Tensor
    """Each layer's scores; NaN where it took none."""
    protected_TP: Tensor
    """Bool: the present tokens that the rule never evicts."""
    newest_T: Tensor
    """The position of the token that each step fed."""

    @property
    def steps(self) -> int:
        return len(self.newest_T)

    @property
    def present_TP(self) -> Tensor:
        """Bool: the tokens that the step attended to, the new one among them."""
        return ~self.utility_TP.isnan()

    @property
    def scored_T(self) -> Tensor:
        """Bool: the steps that took scores."""
        return ~self.score_TLP.isnan().all(-1).all(-1)

    @property
    def raw_TP(self) -> Tensor:
        """The mean over layers of a step's scores."""
        return self.score_TLP.nanmean(1)

    def first(self, steps: int) -> RowTrace:
        """The first steps, and the positions that they knew."""
        length = int(self.newest_T[:steps].max()) + 1 if min(steps, self.steps) else 0
        return self._at(slice(steps), slice(length))

    def scored(self) -> RowTrace:
        """The steps that took scores."""
        return self._at(self.scored_T)

    def then(self, later: RowTrace) -> RowTrace:
        """These steps, and those of `later` after them."""
        new = later.utility_TP.shape[-1] - self.utility_TP.shape[-1]

        def joined(name: str, absent: float) -> Tensor:
            mine = torch.nn.functional.pad(getattr(self, name), (0, new), value=absent)
            return torch.cat([mine, getattr(later, name)])

        newest_T = torch.cat([self.newest_T, later.newest_T])
        protected_TP = joined("protected_TP", False)
        return RowTrace(joined("utility_TP", math.nan), joined("score_TLP", math.nan), protected_TP, newest_T)

    def _at(self, steps: Tensor | slice, positions: slice = slice(None)) -> RowTrace:
        utility_TP, score_TLP, protected_TP = (
            value[steps][..., positions] for value in (self.utility_TP, self.score_TLP, self.protected_TP)
        )
        return RowTrace(utility_TP, score_TLP, protected_TP, self.newest_T[steps])


def row_trace(recording: Recording, row: int = 0, limits: Limits | None = None) -> RowTrace:
    """A row of a recording by position. `limits`: what the rule protects in this row, tensors of one element;
    None: nothing."""
    steps = recording.newest_TB[:, row] > EMPTY
    position_TN, newest_T = recording.position_TBN[steps, row], recording.newest_TB[steps, row]
    position_TP = by_position(position_TN, position_TN, fill=EMPTY)
    protected_TP = torch.zeros_like(position_TP, dtype=torch.bool)
    if limits is not None:
        protected_TP = protected(position_TP[:, None], newest_T, limits)[:, 0] & (position_TP > EMPTY)
    return RowTrace(
        by_position(recording.utility_TBN[steps, row], position_TN),
        by_position(recording.score_TLBN[steps, :, row], position_TN[:, None]),
        protected_TP,
        newest_T,
    )


def by_position(value: Tensor, position: Tensor, fill: float = math.nan) -> Tensor:
    """Values [..., N] of slots in the order of their positions, [..., P]; `fill` where no slot holds one.
    `position` broadcasts to `value`; P is one more than the largest of all."""
    length = int(position.max()) + 1 if position.numel() else 0
    index = torch.where(position > EMPTY, position, length).long().expand(value.shape)
    out = value.new_full((*value.shape[:-1], length + 1), fill)
    return out.scatter_(-1, index, value)[..., :length].contiguous()


# Sets


def top_set(value: Tensor, present: Tensor, budget: int | Tensor, protected: Tensor | None = None) -> Tensor:
    """Bool mask [..., P] of the `budget` present tokens with the largest values, or all where there are no
    more; of equals the newer one. Protected ones come first. A budget for each set is a tensor [...]."""
    value = value.masked_fill(~present, -torch.inf)
    if protected is not None:
        value = value.masked_fill(protected & present, torch.inf)
    order = value.flip(-1).argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(value.shape[-1], device=value.device)
    first = place < torch.as_tensor(budget, device=value.device)[..., None]
    chosen = torch.zeros_like(present).scatter(-1, len(place) - 1 - order, first.expand(order.shape))
    return chosen & present


def raw_sets(trace: RowTrace, budget: int) -> Tensor:
    """Top B of each step's scores, bool [T, P]."""
    raw_TP = trace.raw_TP
    return top_set(raw_TP, ~raw_TP.isnan(), budget, trace.protected_TP)


def layer_sets(trace: RowTrace, budget: int) -> Tensor:
    """Top B of each layer's own scores, nothing being protected, bool [T, L, P]; empty where it took none."""
    return top_set(trace.score_TLP, ~trace.score_TLP.isnan(), budget)


def ema_sets(trace: RowTrace, budget: int) -> Tensor:
    """Top B of each step's utilities, bool [T, P]."""
    return top_set(trace.utility_TP, trace.present_TP, budget, trace.protected_TP)


def retained_sets(trace: RowTrace, budget: int) -> Tensor:
    """Of a run that keeps every token: what its rule would keep after each step, bool [T, P], the top B of
    what has stayed and the new token."""
    kept, gone_P = [], torch.zeros_like(trace.protected_TP[0])
    for utility_P, present_P, protected_P in zip(
        trace.utility_TP, trace.present_TP, trace.protected_TP, strict=True
    ):
        kept.append(top_set(utility_P, present_P & ~gone_P, budget, protected_P))
        gone_P = gone_P | (present_P & ~kept[-1])
    return torch.stack(kept)


def cached_sets(trace: RowTrace, budget: int) -> Tensor:
    """Of a run that evicts: what its cache held after each step, bool [T, P], which is what the next step saw
    but for its new token; after the last step the top B."""
    kept_TP = trace.present_TP.roll(-1, 0)
    kept_TP[torch.arange(trace.steps), trace.newest_T.roll(-1)] = False
    kept_TP[-1] = ema_sets(trace, budget)[-1]
    return kept_TP


# Statistics of sets and values


def arrivals(set_TP: Tensor) -> Tensor:
    """Tokens of each set that the step before did not have, [T - 1]."""
    return (set_TP[1:] & ~set_TP[:-1]).sum(-1)


def churn(set_TP: Tensor) -> Tensor:
    """Share of each set that the step before did not have, [T - 1]."""
    return arrivals(set_TP) / set_TP[1:].sum(-1)


def jaccard(a: Tensor, b: Tensor) -> Tensor:
    """Tokens in both sets [..., P] over tokens in either one, [...]."""
    return (a & b).sum(-1) / (a | b).sum(-1)


def share_lost(wanted: Tensor, kept: Tensor) -> Tensor:
    """Share of the set `wanted` [..., P] that is not in `kept`, [...]."""
    return (wanted & ~kept).sum(-1) / wanted.sum(-1)


def boundary_margin(value: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Smallest value inside a set less the largest one outside, in standard deviations of all of them, [...].
    `inside` and `outside` are bool [..., P]; protected tokens belong to neither."""
    gap = value.masked_fill(~inside, torch.inf).amin(-1) - value.masked_fill(~outside, -torch.inf).amax(-1)
    either = inside | outside
    count = either.sum(-1)
    mean = value.masked_fill(~either, 0).sum(-1) / count
    spread = (((value - mean[..., None]) ** 2).masked_fill(~either, 0).sum(-1) / count).sqrt()
    return torch.where(gap.isfinite() & (spread > 0), gap / spread, torch.nan)


def score_entropy(score: Tensor) -> Tensor:
    """Entropy of scores [..., P] as a distribution over the tokens that have one, over log n, [...]: 1 where
    all are equal, 0 where one has everything. NaN where a score is negative, or all are 0."""
    share = score.nan_to_num(0)
    share = share / share.sum(-1, keepdim=True)
    count = (~score.isnan()).sum(-1)
    entropy = torch.special.entr(share).sum(-1) / count.double().log()
    return torch.where((share >= 0).all(-1) & (count > 1), entropy, torch.nan)


def rank_changes(value_TP: Tensor, set_TP: Tensor) -> Tensor:
    """How far the tokens that a set shares with the one before have moved among each other, [T - 1]: their
    mean change of rank over the largest possible one."""
    common = set_TP[1:] & set_TP[:-1]
    moved = (ranks(value_TP[1:], common) - ranks(value_TP[:-1], common)).abs()
    count = common.sum(-1)
    return torch.where(count > 1, moved.nansum(-1) / count / (count - 1), torch.nan)


def ranks(value: Tensor, among: Tensor) -> Tensor:
    """Ranks of the values [..., P] among those marked, from 0 for the least one, float64; equal values share
    the mean of their ranks. NaN elsewhere."""
    value = value.masked_fill(~among, torch.inf).contiguous()
    ordered = value.sort(-1).values
    first, last = (torch.searchsorted(ordered, value, side=side) for side in ("left", "right"))
    return ((first + last - 1) / 2).double().masked_fill(~among, torch.nan)


def spearman(a: Tensor, b: Tensor, among: Tensor) -> Tensor:
    """Rank correlation of two scores [..., P] of the tokens marked, [...]; NaN where one of them is flat."""
    centred = []
    for value in (a, b):
        rank = ranks(value, among)
        centred.append((rank - rank.nanmean(-1, keepdim=True)).nan_to_num(0))
    x, y = centred
    return (x * y).sum(-1) / ((x * x).sum(-1) * (y * y).sum(-1)).sqrt()


def stability(trace: RowTrace, budget: int) -> dict[str, float]:
    """A row of Table 13: means over the steps of a run, or over those that scored where scores are needed."""
    ema_TP, kept_TP = ema_sets(trace, budget), retained_sets(trace, budget)
    free_TP = trace.present_TP & ~trace.protected_TP
    scored, scored_T = trace.scored(), trace.scored_T
    raw_TP = raw_sets(scored, budget)
    statistics = {
        "raw_churn": churn(raw_TP),
        "ema_churn": churn(ema_TP),
        "raw_ema_jaccard": jaccard(raw_TP, ema_TP[scored_T]),
        "raw_evicted": share_lost(raw_TP, kept_TP[scored_T]),
        "at_most_one_change": arrivals(ema_TP) <= 1,
        "boundary_margin": boundary_margin(trace.utility_TP, ema_TP & free_TP, free_TP & ~ema_TP),
        "score_entropy": score_entropy(scored.raw_TP),
        "rank_changes": rank_changes(trace.utility_TP, ema_TP),
    }
    return {name: values.double().nanmean().item() for name, values in statistics.items()}


# Between scorers


def layer_spearman(a: RowTrace, b: RowTrace) -> Tensor:
    """Rank correlation of two rules' scores of the same tokens at the same steps, a mean over them, [L]."""
    assert torch.equal(a.present_TP, b.present_TP)
    return spearman(a.score_TLP, b.score_TLP, ~(a.score_TLP.isnan() | b.score_TLP.isnan())).nanmean(0)


def layer_jaccard(a: RowTrace, b: RowTrace, budget: int) -> Tensor:
    """Jaccard of two rules' top B in each layer, a mean over the same steps, [L]."""
    assert torch.equal(a.present_TP, b.present_TP)
    return jaccard(layer_sets(a, budget), layer_sets(b, budget)).nanmean(0)


# Layers


def layer_weights(config: EvictionConfig, num_layers: int) -> tuple[list[float], float]:
    """The weights of each layer's score, and of the step before, in a step's utility: the recurrence over
    `num_layers` layers that score, multiplied out. Those of a moving average add up to 1."""
    decay, gain = layer_coefficients(config, num_layers)
    return [g * math.prod(decay[i + 1 :]) for i, g in enumerate(gain)], math.prod(decay)


def addends(trace: RowTrace, config: EvictionConfig) -> Tensor:
    """What the utilities of the steps that scored are the sum of, [T, L + 1, P]: the layers' weighted scores
    and, last, what is left of the step before. 0 for a layer without scores, and for a new token's past."""
    scores_L = ~trace.score_TLP.isnan().all(-1).all(0)
    weights, memory = layer_weights(config, int(scores_L.sum()))
    weight_L = trace.score_TLP.new_zeros(len(scores_L))
    weight_L[scores_L] = trace.score_TLP.new_tensor(weights)
    past_TP = torch.nn.functional.pad(trace.utility_TP[:-1], (0, 0, 1, 0)).nan_to_num(0)
    past_T1P = memory * past_TP[:, None].to(trace.score_TLP.dtype)
    return torch.cat([weight_L[:, None] * trace.score_TLP.nan_to_num(0), past_T1P], 1)[trace.scored_T]


@dataclass(frozen=True)
class LayerProfile:
    """Which vote decides: one number for each layer and, last, for the step before."""

    margin_share_L: Tensor
    """Its share of the margin between the mean utilities of the top B and of all other tokens, over all
    steps. Shares add up to 1; a negative one has voted against."""
    decided_L: Tensor
    """Share of the top B that would be other tokens without it, a mean over steps. These need not add up to
    1: two votes may decide together, or each be enough."""


def layer_profile(trace: RowTrace, config: EvictionConfig, budget: int) -> LayerProfile:
    """Of the steps that took scores. `config` is the rule that the run was recorded under."""
    part_TLP, scored = addends(trace, config), trace.scored()

    def top(value_TP: Tensor) -> Tensor:
        return top_set(value_TP, scored.present_TP, budget, scored.protected_TP)

    total_TP = part_TLP.sum(1)
    set_TP = top(total_TP)
    inside, outside = set_TP[:, None], (scored.present_TP & ~set_TP)[:, None]
    margin_TL = (part_TLP * inside).sum(-1) / inside.sum(-1) - (part_TLP * outside).sum(-1) / outside.sum(-1)
    without_LT = torch.stack([share_lost(set_TP, top(total_TP - part_TP)) for part_TP in part_TLP.unbind(1)])
    return LayerProfile(margin_TL.nansum(0) / margin_TL.nansum(), without_LT.double().mean(-1))
