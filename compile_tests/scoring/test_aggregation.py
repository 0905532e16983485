"""From scores to utilities: the two forms of the recurrence, and the variance that the EMA promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inertiakv import EvictionConfig
from inertiakv.decoding.decoding_rule import DecodingRule
from inertiakv.scoring.aggregation import layer_coefficients, updated

LAYERS = 8


def run(config: EvictionConfig, score_TLN: torch.Tensor, start_N: torch.Tensor | None = None) -> torch.Tensor:
    """Utilities after T steps of L layers each."""
    steps, layers, slots = score_TLN.shape
    aggregation = DecodingRule(config, layers, (None,), "dense", score_TLN.dtype, torch.device("cpu"))
    utility_1N = torch.zeros(1, slots, dtype=score_TLN.dtype) if start_N is None else start_N[None].clone()
    everywhere_1N = torch.ones(1, slots, dtype=torch.bool)
    for step in range(steps):
        for layer in range(layers):
            smoothing = aggregation.coefficients()[layer].smoothing
            utility_1N = updated(utility_1N, score_TLN[step, layer][None], everywhere_1N, smoothing)
    return utility_1N[0]


def scores(steps: int, seed: int, layers: int = LAYERS, slots: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(steps, layers, slots, dtype=torch.float64, generator=generator)


alphas = st.sampled_from([0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.999])
step_alphas = st.sampled_from([None, 0.0, 0.25, 0.9])


@given(alphas, st.integers(1, 40), st.integers(0, 1000))
def test_the_recurrence_over_layers_is_an_ema_over_steps_of_a_weighted_mean_over_layers(
    alpha: float, layers: int, seed: int
) -> None:
    score_TLN = scores(5, seed, layers)
    recurrence = run(EvictionConfig(alpha=alpha), score_TLN)
    written_out = run(EvictionConfig(alpha=alpha, step_alpha=alpha**layers), score_TLN)
    torch.testing.assert_close(recurrence, written_out, rtol=1e-11, atol=1e-13)


@given(st.sampled_from(["layer_temporal", "temporal", "layer"]), alphas, step_alphas, st.integers(1, 12))
def test_every_coupling_weighs_layers_and_steps_as_it_says(
    coupling: str, alpha: float, step_alpha: float | None, layers: int
) -> None:
    unused = coupling == "temporal" and step_alpha is not None
    config = EvictionConfig(alpha=None if unused else alpha, coupling=coupling, step_alpha=step_alpha)
    equal = [1.0] * layers
    later = [alpha ** (layers - layer) for layer in range(1, layers + 1)]
    weights, memory = {
        "layer_temporal": (later, alpha**layers),
        "temporal": (equal, alpha),
        "layer": (later, 0.0),
    }[coupling]
    memory = memory if step_alpha is None else step_alpha
    score_TLN, start_N = scores(3, layers, layers), torch.linspace(0, 2, 16, dtype=torch.float64)
    expected_N = start_N
    for score_LN in score_TLN:
        mean_N = (torch.tensor(weights, dtype=torch.float64)[:, None] * score_LN).sum(0) / sum(weights)
        expected_N = memory * expected_N + (1 - memory) * mean_N
    torch.testing.assert_close(run(config, score_TLN, start_N), expected_N, rtol=1e-11, atol=1e-13)
    flat = run(config, torch.ones(1, layers, 1, dtype=torch.float64)).item()
    assert flat == pytest.approx(1 - memory, abs=1e-12), "one step's weights and the memory add up to 1"


def test_thirty_two_layers_at_the_default_alpha_remember_next_to_nothing() -> None:
    for alpha, memory in ((0.8, 0.0008), (0.9, 0.034), (0.95, 0.19)):
        decay, _ = layer_coefficients(EvictionConfig(alpha=alpha), 32)
        assert math.prod(decay) == pytest.approx(memory, rel=0.03)


def test_a_sum_adds_every_layer_of_every_step() -> None:
    score_TLN = scores(4, 1)
    out_N = run(EvictionConfig(aggregation="cumulative"), score_TLN)
    torch.testing.assert_close(out_N, score_TLN.sum((0, 1)), rtol=1e-12, atol=0)


def test_a_single_step_is_the_last_layers_score() -> None:
    score_TLN = scores(4, 1)
    assert torch.equal(run(EvictionConfig(aggregation="single"), score_TLN), score_TLN[-1, -1])
    assert torch.equal(run(EvictionConfig(alpha=0.0), score_TLN), score_TLN[-1, -1])
    assert torch.equal(run(EvictionConfig(alpha=0.0, coupling="layer"), score_TLN), score_TLN[-1, -1])


def test_alpha_zero_over_steps_alone_is_the_mean_over_layers() -> None:
    score_TLN = scores(3, 2)
    out_N = run(EvictionConfig(alpha=0.0, coupling="temporal"), score_TLN)
    torch.testing.assert_close(out_N, score_TLN[-1].mean(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "config",
    [EvictionConfig(), EvictionConfig(coupling="temporal"), EvictionConfig(aggregation="cumulative")],
)
def test_tokens_that_are_not_scored_keep_their_utility(config: EvictionConfig) -> None:
    aggregation = DecodingRule(config, 2, (None,), "dense", torch.float32, torch.device("cpu"))
    utility_BN = torch.tensor([[0.5, 0.25, 0.0], [0.5, 0.25, 0.0]])
    before_BN = utility_BN
    scored_BN = torch.tensor([[True, False, True], [False, False, False]])
    for layer in range(2):
        utility_BN = updated(
            utility_BN, torch.full((2, 3), 0.7), scored_BN, aggregation.coefficients()[layer].smoothing
        )
    assert torch.equal(utility_BN[~scored_BN], before_BN[~scored_BN])
    assert (utility_BN[scored_BN] != before_BN[scored_BN]).all()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.9, 0.95])
def test_the_emas_gap_between_two_tokens_has_the_variance_that_the_paper_bounds(alpha: float) -> None:
    """Independent scores of variance sigma^2 and a mean gap d: the EMA's gap has variance at most
    2 (1 - alpha) / (1 + alpha) sigma^2 and misranks with probability at most that over d^2."""
    trials, steps, sigma, gap = 20_000, 200, 0.3, 0.25
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(steps, 1, 2 * trials, dtype=torch.float64, generator=generator)
    mean = torch.cat((torch.full((trials,), gap), torch.zeros(trials))).double()
    utility = run(EvictionConfig(alpha=alpha, coupling="temporal"), noise * sigma + mean)
    gaps = utility[:trials] - utility[trials:]
    variance, bound = gaps.var().item(), 2 * (1 - alpha) / (1 + alpha) * sigma**2
    sampling_error = 5 * math.sqrt(2 / trials)
    assert variance == pytest.approx(bound, rel=sampling_error), "the bound is attained in the limit"
    assert gaps.mean().item() == pytest.approx(gap, abs=5 * math.sqrt(bound / trials))
    assert (gaps <= 0).double().mean().item() <= bound / gap**2


@pytest.mark.parametrize("alpha", [0.3, 0.8, 0.95])
def test_the_variance_grows_towards_the_bound_and_never_beyond(alpha: float) -> None:
    trials, sigma = 20_000, 0.3
    generator = torch.Generator().manual_seed(6)
    noise = sigma * torch.randn(60, 1, 2 * trials, dtype=torch.float64, generator=generator)
    bound = 2 * (1 - alpha) / (1 + alpha) * sigma**2
    last = 0.0
    for steps in (1, 3, 10, 60):
        utility = run(EvictionConfig(alpha=alpha, coupling="temporal"), noise[:steps])
        variance = (utility[:trials] - utility[trials:]).var().item()
        assert last * (1 - 5 * math.sqrt(2 / trials)) <= variance <= bound * (1 + 5 * math.sqrt(2 / trials))
        last = variance


def test_an_increasing_transformation_of_expected_scores_keeps_the_ranking() -> None:
    expected = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    config = EvictionConfig(alpha=0.9, coupling="temporal")
    order = run(config, expected.expand(30, 1, -1)).argsort()
    for change in (torch.exp, lambda s: s**3 + 2 * s, lambda s: -1 / (s + 0.1)):
        assert torch.equal(run(config, change(expected).expand(30, 1, -1)).argsort(), order)
    assert torch.equal(expected.argsort(), order)
