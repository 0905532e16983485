"""What a recorded run shows: how stable the retained sets are, and which scores and layers decide them.

Pure functions of tensors keyed by position, which `row_trace` makes from a `Recording`. They measure what
Table 13 of InertiaKV (arXiv 2609.03515) measures, at 90 % compression: raw top-B churn 34 %, EMA churn 8 %,
at most one token changed in 75 % of the steps; between attention, value norm and entropy as scorers a
Spearman correlation and a mean pairwise Jaccard of 0.97, between attention and KeyDiff 0.49 and 0.38.

*Raw* is the mean over layers of a step's scores, *EMA* the utility that the rule makes of them, whatever its
aggregation. Sets are *virtual*: the top B of all tokens that the step could see. A run which evicts sees no
more than B + 1 tokens, so that such statistics want a run which keeps every token; what a rule would retain
of it is `retained_sets`. What a run which evicts did retain is `cached_sets`. Where a statistic is not
defined (one step alone, scores that are no distribution) it is NaN.

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
    """One row of a recording, keyed by position. Ends where the row ended."""

    utility_TP: Tensor
    """After the step's update, before its eviction; NaN where `present_TP` is False."""
    score_TLP: Tensor
    """Each layer's scores; NaN where it took none."""
    present_TP: Tensor
    """Bool: the tokens that the step attended to, the new one among them."""
    protected_TP: Tensor
    """Bool: those of them that the rule never evicts."""
    newest_T: Tensor
    """The position of the token that each step fed."""

    @property
    def steps(self) -> int:
        return len(self.newest_T)

    def first(self, steps: int) -> RowTrace:
        """The first steps alone, and the positions that they knew."""
        length = int(self.newest_T[:steps].max()) + 1 if min(steps, self.steps) else 0
        return self._at(slice(steps), slice(length))

    def scored(self) -> RowTrace:
        """The steps which took scores."""
        return self._at(self.scored_T)

    def then(self, later: RowTrace) -> RowTrace:
        """The steps of both, those of `later` after these."""

        def joined(name: str, absent: float) -> Tensor:
            mine, theirs = getattr(self, name), getattr(later, name)
            new = theirs.shape[-1] - mine.shape[-1]
            return torch.cat([torch.nn.functional.pad(mine, (0, new), value=absent), theirs])

        return RowTrace(
            joined("utility_TP", math.nan),
            joined("score_TLP", math.nan),
            joined("present_TP", False),
            joined("protected_TP", False),
            torch.cat([self.newest_T, later.newest_T]),
        )

    @property
    def scored_T(self) -> Tensor:
        """Bool: the steps which took scores."""
        return ~self.score_TLP.isnan().all(-1).all(-1)

    @property
    def raw_TP(self) -> Tensor:
        """The mean over layers of a step's scores."""
        return self.score_TLP.nanmean(1)

    def _at(self, steps: Tensor | slice, positions: slice = slice(None)) -> RowTrace:
        return RowTrace(
            self.utility_TP[steps][..., positions],
            self.score_TLP[steps][..., positions],
            self.present_TP[steps][..., positions],
            self.protected_TP[steps][..., positions],
            self.newest_T[steps],
        )


def row_trace(recording: Recording, row: int = 0, limits: Limits | None = None) -> RowTrace:
    """A row of a recording by position. `limits`: what the rule protects in this row, tensors of one element;
    None: nothing."""
    steps = recording.newest_TB[:, row] > EMPTY
    position_TN, newest_T = recording.position_TBN[steps, row], recording.newest_TB[steps, row]
    position_TP = by_position(position_TN, position_TN, fill=EMPTY)
    present_TP = position_TP > EMPTY
    protected_TP = torch.zeros_like(present_TP)
    if limits is not None:
        protected_TP = protected(position_TP[:, None], newest_T, limits)[:, 0] & present_TP
    return RowTrace(
        by_position(recording.utility_TBN[steps, row], position_TN),
        by_position(recording.score_TLBN[steps, :, row], position_TN[:, None]),
        present_TP,
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
# ----------------------------------------------------------------------------------------------------------


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
    """Of a run which keeps every token, what a rule that sees its utilities would keep after each step, bool
    [T, P]: the top B among what has stayed and the new token."""
    kept_TP = torch.empty_like(trace.present_TP)
    gone_P = torch.zeros_like(trace.present_TP[0])
    for step, present_P in enumerate(trace.present_TP):
        kept_TP[step] = top_set(trace.utility_TP[step], present_P & ~gone_P, budget, trace.protected_TP[step])
        gone_P = gone_P | (present_P & ~kept_TP[step])
    return kept_TP


def cached_sets(trace: RowTrace, budget: int) -> Tensor:
    """Of a run which evicts, what its cache held after each step, bool [T, P]: what the next step saw, its
    new token left out; after the last step the top B."""
    kept_TP = trace.present_TP.roll(-1, 0)
    kept_TP[torch.arange(trace.steps), trace.newest_T.roll(-1)] = False
    kept_TP[-1] = top_set(trace.utility_TP[-1], trace.present_TP[-1], budget, trace.protected_TP[-1])
    return kept_TP


# Statistics of sets and values
# ----------------------------------------------------------------------------------------------------------


def arrivals(set_TP: Tensor) -> Tensor:
    """Tokens of each set that the step before did not have, int64 [T - 1]."""
    return (set_TP[1:] & ~set_TP[:-1]).sum(-1)


def churn(set_TP: Tensor) -> Tensor:
    """Share of each set that the step before did not have, [T - 1]. Table 13: raw 34 %, EMA 8 %."""
    return arrivals(set_TP) / set_TP[1:].sum(-1)


def at_most_one_change(set_TP: Tensor) -> Tensor:
    """1 where a step brought at most one token into the set, else 0, [T - 1]. Table 13: 75 % on average."""
    return (arrivals(set_TP) <= 1).double()


def jaccard(a: Tensor, b: Tensor) -> Tensor:
    """Tokens in both sets [..., P] over tokens in either one, [...]."""
    return (a & b).sum(-1) / (a | b).sum(-1)


def share_lost(wanted: Tensor, kept: Tensor) -> Tensor:
    """Share of the set `wanted` [..., P] that is not in `kept`, [...]: of raw sets and retained ones, the
    share of what the step looks at most that has been evicted."""
    return (wanted & ~kept).sum(-1) / wanted.sum(-1)


def boundary_margin(value: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Smallest value inside a set less the largest one outside, in standard deviations of all of them,
    [...]: how far the last token kept is from the first one that goes. `inside` and `outside` are bool
    [..., P]; protected tokens belong to neither."""
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
    """How far the tokens that a set has in common with the one before have moved among each other, [T - 1]:
    the mean change of rank over the largest possible one. What comes and goes moves nobody."""
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


@dataclass(frozen=True)
class Stability:
    """Means over the steps of a run, which describe its rule as a row of Table 13 does."""

    raw_churn: float
    ema_churn: float
    raw_ema_jaccard: float
    raw_evicted: float
    at_most_one_change: float
    boundary_margin: float
    score_entropy: float
    rank_changes: float


def stability(trace: RowTrace, budget: int) -> Stability:
    """Every statistic of a run at a budget. Those which need scores are taken over the steps that scored."""
    ema_TP, kept_TP = ema_sets(trace, budget), retained_sets(trace, budget)
    free_TP = trace.present_TP & ~trace.protected_TP
    margin_T = boundary_margin(trace.utility_TP, ema_TP & free_TP, free_TP & ~ema_TP)
    scored, scored_T = trace.scored(), trace.scored_T
    raw_TP = raw_sets(scored, budget)

    def mean(values: Tensor) -> float:
        return values.double().nanmean().item()

    return Stability(
        raw_churn=mean(churn(raw_TP)),
        ema_churn=mean(churn(ema_TP)),
        raw_ema_jaccard=mean(jaccard(raw_TP, ema_TP[scored_T])),
        raw_evicted=mean(share_lost(raw_TP, kept_TP[scored_T])),
        at_most_one_change=mean(at_most_one_change(ema_TP)),
        boundary_margin=mean(margin_T),
        score_entropy=mean(score_entropy(scored.raw_TP)),
        rank_changes=mean(rank_changes(trace.utility_TP, ema_TP)),
    )


# Between scorers
# ----------------------------------------------------------------------------------------------------------


def layer_spearman(a: RowTrace, b: RowTrace) -> Tensor:
    """Rank correlation of two rules' scores of the same tokens, a mean over steps, [L]. With attention as one
    of them the paper has 0.97 for value norm and entropy, 0.49 KeyDiff, 0.12 recency, 0.00 key norm.

    Raises ValueError where the runs did not see the same tokens at the same steps.
    """
    check_same_steps(a, b)
    return spearman(a.score_TLP, b.score_TLP, ~(a.score_TLP.isnan() | b.score_TLP.isnan())).nanmean(0)


def layer_jaccard(a: RowTrace, b: RowTrace, budget: int) -> Tensor:
    """Jaccard of two rules' top B in each layer, a mean over steps, [L]. Between attention, value norm and
    entropy the paper has 0.97 on average, of attention with KeyDiff 0.38. Raises as `layer_spearman`."""
    check_same_steps(a, b)
    return jaccard(layer_sets(a, budget), layer_sets(b, budget)).nanmean(0)


def check_same_steps(a: RowTrace, b: RowTrace) -> None:
    """Raise ValueError where two runs did not see the same tokens at the same steps."""
    if a.present_TP.shape != b.present_TP.shape or not torch.equal(a.present_TP, b.present_TP):
        shapes = f"{list(a.present_TP.shape)} and {list(b.present_TP.shape)}"
        raise ValueError(f"these runs did not see the same tokens (steps and positions: {shapes})")


# Layers
# ----------------------------------------------------------------------------------------------------------


def layer_weights(config: EvictionConfig, num_layers: int) -> tuple[list[float], float]:
    """What each layer's score, and the utility of the step before, weigh in a step's utility: the
    recurrence over `num_layers` eligible layers multiplied out. Of a moving average they add up to 1."""
    decay, gain = layer_coefficients(config, num_layers)
    return [g * math.prod(decay[i + 1 :]) for i, g in enumerate(gain)], math.prod(decay)


def addends(trace: RowTrace, config: EvictionConfig) -> Tensor:
    """The parts that the utilities of the steps that scored are the sum of, [T, L + 1, P]: the layers'
    weighted scores and, as the last one, what is left of the step before. 0 for a layer that takes no
    scores. The new token's part of the past is 0."""
    scores_L = ~trace.score_TLP.isnan().all(-1).all(0)
    weights, memory = layer_weights(config, int(scores_L.sum()))
    weight_L = trace.score_TLP.new_zeros(len(scores_L)).masked_scatter(
        scores_L, trace.score_TLP.new_tensor(weights)
    )
    past_TP = torch.cat([torch.zeros_like(trace.utility_TP[:1]), trace.utility_TP[:-1]]).nan_to_num(0)
    part_TLP = torch.cat(
        [
            weight_L[:, None] * trace.score_TLP.nan_to_num(0),
            memory * past_TP[:, None].to(trace.score_TLP.dtype),
        ],
        1,
    )
    return part_TLP[trace.scored_T]


@dataclass(frozen=True)
class LayerProfile:
    """Which vote decides: one number for each layer and, as the last one, for the step before."""

    margin_share_L: Tensor
    """Its part of the margin by which the mean utility of the top B exceeds that of all other tokens.
    Utilities are sums of the `addends`, and so is the margin: the shares, of the steps' margins together,
    add up to 1. A negative one has voted against."""
    decided_L: Tensor
    """Share of the top B that would be other tokens without it, a mean over steps. These add up to nothing
    in particular: two votes may decide together, or each be enough."""


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
