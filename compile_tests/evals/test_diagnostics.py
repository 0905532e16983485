"""Statistics of recorded runs: made-up recordings of known churn, and everything again in plain Python.

Shape letters: T decode steps, B batch, L layers, N slots, P positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import pearsonr, rankdata
from torch import Tensor

from inertiakv import EvictionConfig
from inertiakv.decoding.recording import Recording
from inertiakv.evals import diagnostics as dx
from inertiakv.evals.diagnostics import RowTrace, row_trace
from inertiakv.eviction.protection import Limits
from inertiakv.scoring.aggregation import layer_coefficients

NAN = math.nan


def limits(sinks: int, recent: int, prompt: int = 9, spaced: int = 0) -> Limits:
    return Limits(*(torch.tensor([number]) for number in (sinks, recent, prompt, spaced)))


@dataclass(frozen=True)
class Made:
    """A made-up run of one row, as dictionaries from positions to values, one a step."""

    utilities: list[dict[int, float]]
    scores: list[list[dict[int, float]]]
    """A list of layers a step; an empty dictionary where a layer took none."""
    newest: list[int]

    @property
    def present(self) -> list[set[int]]:
        return [set(utility) for utility in self.utilities]

    @property
    def raw(self) -> list[dict[int, float]]:
        """Mean over the layers which took scores, of the steps which have any."""
        means = []
        for layers in self.scores:
            votes = [layer for layer in layers if layer]
            if votes:
                means.append({p: sum(vote[p] for vote in votes) / len(votes) for p in votes[0]})
        return means

    def recording(self, seed: int = 0, spare: int = 2) -> Recording:
        """Every step's tokens in slots of their own, in no order."""
        generator = torch.Generator().manual_seed(seed)
        slots = max(map(len, self.utilities)) + spare
        steps, layers = len(self.utilities), len(self.scores[0])
        position_TN = torch.full((steps, slots), -1, dtype=torch.int32)
        utility_TN = torch.full((steps, slots), 77.0)  # what an empty slot happens to hold
        score_TLN = torch.full((steps, layers, slots), NAN)
        for step, utility in enumerate(self.utilities):
            order = torch.randperm(slots, generator=generator).tolist()
            for slot, position in zip(order, utility, strict=False):
                position_TN[step, slot] = position
                utility_TN[step, slot] = utility[position]
                for layer, votes in enumerate(self.scores[step]):
                    if votes:
                        score_TLN[step, layer, slot] = votes[position]
        newest_T = torch.tensor(self.newest)
        return Recording(position_TN[:, None], utility_TN[:, None], score_TLN[:, :, None], newest_T[:, None])

    def trace(self, seed: int = 0) -> RowTrace:
        return row_trace(self.recording(seed))


@st.composite
def made_runs(draw: st.DrawFn, lazy: bool = True) -> Made:
    """Runs that keep every token. Small whole numbers: equal ones are common."""
    prompt, steps, layers = draw(st.integers(1, 7)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    number = st.integers(0, 4)
    silent = draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))

    def values(count: int) -> dict[int, float]:
        return dict(enumerate(map(float, draw(st.lists(number, min_size=count, max_size=count)))))

    utilities, scores = [], []
    for step in range(steps):
        count = prompt + step + 1
        scored = step == 0 or not lazy or draw(st.booleans())
        utilities.append(values(count))
        scores.append([values(count) if scored and layer not in silent else {} for layer in range(layers)])
    return Made(utilities, scores, list(range(prompt, prompt + steps)))


budgets = st.integers(1, 6)


def top(values: dict[int, float], budget: int) -> set[int]:
    return set(sorted(values, key=lambda p: (values[p], p), reverse=True)[:budget])


def as_sets(mask: Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


def as_dicts(value: Tensor) -> list[dict[int, float]]:
    return [{p: v for p, v in enumerate(row) if not math.isnan(v)} for row in value.tolist()]


def average(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else NAN


def close(actual: Tensor | float, expected: Sequence[float] | float) -> None:
    actual = torch.as_tensor(actual, dtype=torch.float64)
    wanted = torch.tensor(expected, dtype=torch.float64).reshape(actual.shape)
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


# From slots to positions


@given(made_runs(), st.integers(0, 99))
def test_nothing_depends_on_slots(run: Made, seed: int) -> None:
    trace = run.trace(seed)
    assert as_sets(trace.present_TP) == run.present
    assert trace.newest_T.tolist() == run.newest
    assert as_dicts(trace.utility_TP) == run.utilities
    assert [as_dicts(layers_LP) for layers_LP in trace.score_TLP] == run.scores
    assert trace.scored_T.tolist() == [any(layers) for layers in run.scores]


def test_rows_of_a_batch_end_at_their_own_steps() -> None:
    recording = Recording(
        position_TBN=torch.tensor([[[2, 0, 1], [0, 5, -1]], [[2, 3, 1], [0, 5, -1]]], dtype=torch.int32),
        utility_TBN=torch.tensor([[[0.2, 0.0, 0.1], [0.3, 0.5, 9.0]], [[1.2, 1.3, 1.1], [0.3, 0.5, 9.0]]]),
        score_TLBN=torch.full((2, 1, 2, 3), NAN),
        newest_TB=torch.tensor([[2, 5], [3, -1]]),
    )
    first, second = (row_trace(recording, row) for row in (0, 1))
    close(first.utility_TP, [[0.0, 0.1, 0.2, NAN], [NAN, 1.1, 1.2, 1.3]])
    assert (first.steps, second.steps) == (2, 1)
    close(second.utility_TP, [[0.3, NAN, NAN, NAN, NAN, 0.5]])
    assert as_sets(second.present_TP) == [{0, 5}]
    close(first.first(1).utility_TP, [[0.0, 0.1, 0.2]])
    assert first.first(9).utility_TP.shape == (2, 4)
    assert first.first(0).utility_TP.shape == (0, 0)
    assert not first.scored_T.any()


@given(made_runs(), st.integers(0, 5))
def test_a_run_is_its_first_steps_and_those_after_them(run: Made, steps: int) -> None:
    whole = run.trace()
    later = Made(run.utilities[steps:], run.scores[steps:], run.newest[steps:])
    if later.newest:
        joined = whole.first(steps).then(later.trace(seed=1))
        for name in ("utility_TP", "score_TLP", "protected_TP", "newest_T"):
            torch.testing.assert_close(getattr(joined, name), getattr(whole, name), equal_nan=True)


def test_protected_tokens_are_those_of_the_rule() -> None:
    run = Made([dict.fromkeys(range(6), 0.0), {0: 0.0, 4: 0.0, 5: 0.0, 6: 0.0}], [[{}], [{}]], [5, 6])
    trace = row_trace(run.recording(), limits=limits(sinks=2, recent=1))
    assert as_sets(trace.protected_TP) == [{0, 1, 5}, {0, 6}]
    spaced = row_trace(run.recording(), limits=limits(0, 0, prompt=5, spaced=2))
    assert as_sets(spaced.protected_TP) == [{0, 3}, {0}]


# Sets


def test_of_equals_the_newer_token_stays() -> None:
    value, present = torch.tensor([1.0, 3.0, 1.0, 1.0, 2.0]), torch.tensor([True, True, True, True, False])
    assert as_sets(dx.top_set(value, present, 2)[None]) == [{1, 3}]
    assert as_sets(dx.top_set(value, present, 9)[None]) == [{0, 1, 2, 3}]
    protected = torch.tensor([True, False, False, False, True])
    assert as_sets(dx.top_set(value, present, 2, protected)[None]) == [{0, 1}]
    each = dx.top_set(value.expand(3, 5), present.expand(3, 5), torch.tensor([0, 1, 3]))
    assert as_sets(each) == [set(), {1}, {1, 2, 3}]


@given(made_runs(), budgets)
def test_sets(run: Made, budget: int) -> None:
    trace = run.trace()
    assert as_sets(dx.ema_sets(trace, budget)) == [top(utility, budget) for utility in run.utilities]
    assert as_sets(dx.raw_sets(trace.scored(), budget)) == [top(raw, budget) for raw in run.raw]
    for step, layers in enumerate(run.scores):
        assert as_sets(dx.layer_sets(trace, budget)[step]) == [top(votes, budget) for votes in layers]


@given(made_runs(), budgets)
def test_what_is_evicted_does_not_come_back(run: Made, budget: int) -> None:
    kept: set[int] = set(run.utilities[0]) - {run.newest[0]}
    expected = []
    for utility, new in zip(run.utilities, run.newest, strict=True):
        kept = top({p: utility[p] for p in kept | {new}}, budget)
        expected.append(kept)
    assert as_sets(dx.retained_sets(run.trace(), budget)) == expected


def test_cached_sets_are_what_the_next_step_saw() -> None:
    utilities = [{0: 5.0, 1: 1.0, 2: 4.0, 3: 0.0}, {0: 5.0, 2: 4.0, 4: 4.0}, {0: 1.0, 4: 2.0, 5: 3.0}]
    run = Made(utilities, [[{}], [{}], [{}]], [3, 4, 5])
    for sets_of in (dx.cached_sets, dx.retained_sets):
        assert as_sets(sets_of(run.trace(), 2)) == [{0, 2}, {0, 4}, {4, 5}]
    trace = row_trace(run.recording(), limits=limits(sinks=1, recent=0))
    assert as_sets(dx.cached_sets(trace, 2)) == [{0, 2}, {0, 4}, {0, 5}]
    near = Made([{**utilities[0], 1: 4.5}, *utilities[1:]], [[{}], [{}], [{}]], [3, 4, 5])
    assert as_sets(dx.cached_sets(near.trace(), 2)) == [{0, 2}, {0, 4}, {4, 5}], "what was kept, whatever by"


# Statistics


def test_known_entropy() -> None:
    score = torch.tensor(
        [
            [1, 1, 1, 1, NAN],  # flat, whatever its sum
            [0, 9, 0, 0, NAN],
            [2, 1, 1, NAN, NAN],
            [1, -1, 2, 1, 1],
            [0, 0, 0, 0, 0],
            [3, NAN, NAN, NAN, NAN],
        ]
    )
    half = (0.5 * math.log(2) + 0.5 * math.log(4)) / math.log(3)
    close(dx.score_entropy(score), [1, 0, half, NAN, NAN, NAN])


def python_ranks(values: dict[int, float]) -> dict[int, float]:
    return dict(zip(values, rankdata(list(values.values())) - 1, strict=True))


def python_spearman(a: dict[int, float], b: dict[int, float]) -> float:
    x, y = ([*python_ranks(values).values()] for values in (a, b))
    return pearsonr(x, y).statistic if len({*x}) > 1 and len({*y}) > 1 else NAN


def python_rank_changes(run: Made, sets: Sequence[set[int]]) -> list[float]:
    changes = []
    for step in range(1, len(sets)):
        common = sets[step] & sets[step - 1]
        before, now = (python_ranks({p: run.utilities[t][p] for p in common}) for t in (step - 1, step))
        moved = sum(abs(now[p] - before[p]) for p in common)
        changes.append(moved / len(common) / (len(common) - 1) if len(common) > 1 else NAN)
    return changes


@given(made_runs(), budgets)
def test_a_row_of_the_table(run: Made, budget: int) -> None:
    ema, raw = [top(u, budget) for u in run.utilities], [top(s, budget) for s in run.raw]
    scored = [step for step, layers in enumerate(run.scores) if any(layers)]
    kept = as_sets(dx.retained_sets(run.trace(), budget))

    def changes(sets: Sequence[set[int]]) -> list[int]:
        return [len(now - before) for before, now in itertools.pairwise(sets)]

    def margin(utility: dict[int, float], inside: set[int]) -> float:
        outside = set(utility) - inside
        mean = sum(utility.values()) / len(utility)
        spread = math.sqrt(sum((v - mean) ** 2 for v in utility.values()) / len(utility))
        gap = min(utility[p] for p in inside) - max((utility[p] for p in outside), default=NAN)
        return gap / spread if spread else NAN

    def entropy(score: dict[int, float]) -> float:
        total = sum(score.values())
        if not total:
            return NAN
        return -sum(v / total * math.log(v / total) for v in score.values() if v) / math.log(len(score))

    actual = dx.stability(run.trace(), budget)
    for name, expected in {
        "raw_churn": [n / len(now) for n, now in zip(changes(raw), raw[1:], strict=True)],
        "ema_churn": [n / len(now) for n, now in zip(changes(ema), ema[1:], strict=True)],
        "raw_ema_jaccard": [len(r & ema[t]) / len(r | ema[t]) for r, t in zip(raw, scored, strict=True)],
        "raw_evicted": [len(r - kept[t]) / len(r) for r, t in zip(raw, scored, strict=True)],
        "at_most_one_change": [float(n <= 1) for n in changes(ema)],
        "boundary_margin": [margin(u, inside) for u, inside in zip(run.utilities, ema, strict=True)],
        "score_entropy": [entropy(score) for score in run.raw],
        "rank_changes": python_rank_changes(run, ema),
    }.items():
        close(actual[name], average(expected))


def test_a_run_that_took_no_scores_has_the_rest_of_the_row() -> None:
    row = dx.stability(Made([{0: 1.0, 1: 2.0}, {0: 1.0, 1: 0.0, 2: 3.0}], [[{}], [{}]], [1, 2]).trace(), 1)
    assert row["ema_churn"] == 1
    assert math.isnan(row["raw_churn"])
    assert math.isnan(row["score_entropy"])


def test_protected_tokens_are_no_part_of_the_margin() -> None:
    run = Made([{0: -9.0, 1: 1.0, 2: 5.0, 3: 8.0}], [[{}]], [3])
    protected = row_trace(run.recording(), limits=limits(sinks=1, recent=0))
    spread = torch.tensor([1.0, 5.0, 8.0]).std(correction=0).item()
    close(dx.stability(protected, 2)["boundary_margin"], (8 - 5) / spread)


# Between scorers


@given(made_runs(), st.randoms(use_true_random=False), budgets)
def test_two_scorers(run: Made, random: Random, budget: int) -> None:
    scores = [[{p: float(random.randint(0, 4)) for p in votes} for votes in layers] for layers in run.scores]
    a, b = run.trace(seed=1), Made(run.utilities, scores, run.newest).trace(seed=2)

    def by_layer(of: Callable[[dict[int, float], dict[int, float]], float]) -> list[float]:
        pairs = zip(zip(*run.scores, strict=True), zip(*scores, strict=True), strict=True)
        return [average([of(x, y) for x, y in zip(*steps, strict=True)]) for steps in pairs]

    def jaccard(x: dict[int, float], y: dict[int, float]) -> float:
        return len(top(x, budget) & top(y, budget)) / len(top(x, budget) | top(y, budget)) if x else NAN

    close(dx.layer_spearman(a, b), by_layer(python_spearman))
    close(dx.layer_jaccard(a, b, budget), by_layer(jaccard))


def test_an_order_is_kept_by_whatever_grows() -> None:
    score = torch.rand(3, 2, 9, generator=torch.Generator().manual_seed(0))
    everything = torch.ones(3, 2, 9, dtype=torch.bool)
    close(dx.spearman(score, score.exp() * 5, everything), [[1, 1]] * 3)
    close(dx.spearman(score, -(score**3), everything), [[-1, -1]] * 3)


def test_runs_of_different_steps_are_not_compared() -> None:
    a = Made([{0: 1.0, 1: 2.0}], [[{0: 1.0, 1: 2.0}]], [1]).trace()
    b = Made([{0: 1.0, 1: 2.0, 2: 1.0}], [[{0: 1.0, 1: 2.0, 2: 1.0}]], [2]).trace()
    for compared in (dx.layer_spearman, lambda *traces: dx.layer_jaccard(*traces, 1)):
        with pytest.raises(AssertionError):
            compared(a, b)


# Layers

RULES = [
    EvictionConfig(),
    EvictionConfig(coupling="temporal", alpha=0.5),
    EvictionConfig(coupling="layer"),
    EvictionConfig(step_alpha=0.7),
    EvictionConfig(aggregation="single"),
    EvictionConfig(aggregation="cumulative"),
]


def followed(run: Made, config: EvictionConfig) -> Made:
    """The run with the utilities that the rule makes of its scores, layer after layer."""
    utility: dict[int, float] = {}
    utilities = []
    for layers, present in zip(run.scores, run.present, strict=True):
        utility = {p: utility.get(p, 0.0) for p in present}
        votes = [layer for layer in layers if layer]
        decays, gains = layer_coefficients(config, len(votes)) if votes else ([], [])
        for vote, decay, gain in zip(votes, decays, gains, strict=True):
            utility = {p: decay * m + gain * vote[p] for p, m in utility.items()}
        utilities.append(utility)
    return Made(utilities, run.scores, run.newest)


@given(made_runs(), st.sampled_from(RULES))
def test_layers_and_the_past_add_up_to_the_utility(run: Made, config: EvictionConfig) -> None:
    trace = followed(run, config).trace()
    expected_TP = trace.scored().utility_TP.nan_to_num(0)
    torch.testing.assert_close(dx.addends(trace, config).sum(1), expected_TP, rtol=1e-4, atol=1e-5)


def test_weights_of_layers() -> None:
    weights, memory = dx.layer_weights(EvictionConfig(alpha=0.8), 3)
    close(torch.tensor([*weights, memory]), [0.2 * 0.64, 0.2 * 0.8, 0.2, 0.512])
    weights, memory = dx.layer_weights(EvictionConfig(coupling="temporal", alpha=0.8), 4)
    close(torch.tensor([*weights, memory]), [0.05] * 4 + [0.8])
    assert dx.layer_weights(EvictionConfig(aggregation="single"), 3) == ([0, 0, 1], 0)


def test_the_layer_that_decides() -> None:
    """Two layers of equal weight: the first knows no difference, the second chooses 1 and 3."""
    flat, clear = dict.fromkeys(range(4), 1.0), {0: 0.0, 1: 4.0, 2: 0.0, 3: 4.0}
    config = EvictionConfig(coupling="temporal", alpha=0.5)
    run = followed(Made([flat], [[flat, clear]], [3]), config)
    profile = dx.layer_profile(run.trace(), config, 2)
    close(profile.margin_share_L, [0, 1, 0])
    # Without it all are equal, and the two newest stay, 2 and 3.
    close(profile.decided_L, [0, 0.5, 0])


def test_a_vote_against_is_negative_and_the_past_has_a_vote() -> None:
    against, clear = {0: 0.0, 1: 1.0, 2: 0.0}, {0: 4.0, 1: 0.0, 2: 0.0}
    config = EvictionConfig(coupling="temporal", alpha=0.5)
    run = followed(
        Made([against] * 2, [[against, clear], [dict.fromkeys(range(3), 0.0)] * 2], [2, 2]), config
    )
    profile = dx.layer_profile(run.trace(), config, 1)
    # Step one: utilities 1, 0.25, 0, so that 0 stays by 1 - 0.125, to which the layers give -0.125 and 1.
    # In step two nothing but half of the past is left.
    total = 0.875 * 1.5
    close(profile.margin_share_L, [-0.125 / total, 1 / total, 0.4375 / total])
    close(profile.decided_L, [0, 0.5, 0.5])


@given(made_runs(), st.sampled_from(RULES[:2]), budgets)
def test_layer_profile(run: Made, config: EvictionConfig, budget: int) -> None:
    run = followed(run, config)
    layers = len(run.scores[0])
    voting = [layer for layer in range(layers) if any(step[layer] for step in run.scores)]
    weights, memory = dx.layer_weights(config, len(voting))
    margins = [0.0] * (layers + 1)
    for step, votes in enumerate(run.scores):
        if not any(votes):
            continue
        before = run.utilities[step - 1] if step else {}
        inside = top(run.utilities[step], budget)
        outside = run.present[step] - inside
        if not outside:
            continue
        parts = [dict.fromkeys(run.present[step], 0.0) for _ in range(layers)]
        for layer, weight in zip(voting, weights, strict=True):
            parts[layer] = {p: weight * vote for p, vote in votes[layer].items()}
        parts.append({p: memory * before.get(p, 0.0) for p in run.present[step]})
        for i, part in enumerate(parts):
            margins[i] += average([part[p] for p in inside]) - average([part[p] for p in outside])
    total = sum(margins)
    if total > 1e-3:
        actual = dx.layer_profile(run.trace(), config, budget).margin_share_L
        torch.testing.assert_close(
            actual.double(), torch.tensor(margins, dtype=torch.float64) / total, rtol=1e-3, atol=1e-3
        )
