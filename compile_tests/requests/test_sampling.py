"""Choosing tokens: filters against a plain reference, and randomness that depends on nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compile_tests.tiny import decoder_for, random_prompt, tiny_model
from inertiakv import EvictionConfig, Sampling
from inertiakv.requests.sampling import sample, uniform

MODEL = tiny_model(13)
RULE = EvictionConfig(compression=0.7, refresh=2)
PROMPTS = [random_prompt(40), random_prompt(12, 1), random_prompt(25, 2)]


def reference(
    logits: np.ndarray[Any, Any], temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray[Any, Any]:
    """The filtered distribution, in float64."""
    p = np.exp((logits - logits.max()) / temperature)
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = order[:top_k]
    p = p / p[kept].sum()
    total, fewest = 0.0, 0
    while total < top_p - 1e-12 and fewest < len(kept):
        total += p[kept[fewest]]
        fewest += 1
    kept = kept[: max(1, fewest)]
    kept = [i for i in kept if p[i] >= min_p * p[kept[0]]]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


def draws(
    logits: Sequence[float], count: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> np.ndarray[Any, Any]:
    """Tokens drawn at `count` positions."""

    def rows(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype)

    return sample(
        torch.tensor(logits, dtype=torch.float32).expand(count, -1),
        temperature_B=rows(temperature),
        top_k_B=rows(top_k, torch.int64),
        top_p_B=rows(top_p),
        min_p_B=rows(min_p),
        seed_B=rows(seed, torch.int64),
        position_B=torch.arange(count),
    ).numpy()


def chi_square(observed: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Standard deviations by which the statistic is above its mean, for categories that are expected often
    enough."""
    often = expected >= 5
    statistic = ((observed[often] - expected[often]) ** 2 / expected[often]).sum()
    freedom = max(1, often.sum() - 1)
    return float((statistic - freedom) / math.sqrt(2 * freedom))


@given(
    seed=st.integers(0, 2**40),
    size=st.integers(1, 40),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([1, 2, 5, 1000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
)
def test_tokens_are_drawn_from_the_filtered_distribution(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)
    expected = reference(logits.astype(np.float64), temperature, top_k, top_p, min_p)
    observed = np.bincount(draws(logits, 2000, temperature, top_k, top_p, min_p, seed), minlength=size)
    assert not observed[expected == 0].any()
    assert chi_square(observed, expected * 2000) < 6


TENTHS = np.log([0.4, 0.3, 0.2, 0.1]).tolist()


@pytest.mark.parametrize(
    "logits, top_k, top_p, min_p, allowed",
    [
        (TENTHS, 1000, 1.0, 0.0, {0, 1, 2, 3}),
        (TENTHS, 3, 1.0, 0.0, {0, 1, 2}),
        (TENTHS, 1000, 0.69, 0.0, {0, 1}),
        (TENTHS, 1000, 0.71, 0.0, {0, 1, 2}),
        (TENTHS, 2, 0.5, 0.0, {0}),  # of the two that top-k leaves, the first has 4 / 7
        (TENTHS, 1000, 1.0, 0.6, {0, 1}),
        (TENTHS, 1000, 1e-9, 0.0, {0}),
        ([0.0] * 4, 1000, 0.25, 0.0, {0}),  # top-p stops as soon as the share is reached
        ([0.0] * 4, 1000, 0.5, 0.0, {0, 1}),
        ([0.0] * 4, 1000, 1.0, 0.0, {0, 1, 2, 3}),
        ([-math.inf, 2.0, 2.0, -math.inf], 1000, 1.0, 0.0, {1, 2}),
    ],
)
def test_filters_follow_one_another(
    logits: list[float], top_k: int, top_p: float, min_p: float, allowed: set[int]
) -> None:
    assert set(draws(logits, 500, 1.0, top_k, top_p, min_p, seed=0).tolist()) == allowed


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**31, 2**32, 2**40 + 7, 2**63 - 1])
def test_uniform_numbers_are_uniform(seed: int) -> None:
    count = 64 * 1000
    u = uniform(torch.full((count,), seed), torch.arange(count)).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert chi_square(np.bincount((u * 64).astype(int), minlength=64), np.full(64, 1000.0)) < 5
    pairs = (u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int)  # neighbouring positions
    assert chi_square(np.bincount(pairs, minlength=256), np.full(256, (count - 1) / 256)) < 5


def test_neighbouring_seeds_are_unrelated() -> None:
    position_B = torch.arange(5000)
    streams = np.stack([uniform(torch.full((5000,), seed), position_B).numpy() for seed in range(12)])
    correlation = np.corrcoef(streams)
    assert np.abs(correlation[~np.eye(12, dtype=bool)]).max() < 5 / math.sqrt(5000)
    across = np.stack([uniform(torch.arange(5000), torch.full((5000,), p)).numpy() for p in range(12)])
    assert chi_square(np.bincount((across * 32).astype(int).ravel(), minlength=32), np.full(32, 1875.0)) < 5


def test_the_same_seed_draws_the_same_tokens_and_another_others() -> None:
    decoder = decoder_for(MODEL, RULE)
    outputs = [
        decoder.generate(PROMPTS[0], 30, sampling=Sampling(temperature=1.0, seed=seed)).tokens[0]
        for seed in (None, 0, 1, 1, 2**40)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[2] == outputs[3]
    assert len({tuple(tokens) for tokens in outputs}) == 3


@pytest.mark.parametrize("rule", [None, RULE])
def test_a_rows_stream_does_not_depend_on_its_neighbours(rule: EvictionConfig | None) -> None:
    seeds = [5, 6, 5]
    options = {"temperature": 1.1, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
    decoder = decoder_for(MODEL, rule)
    tokens = decoder.generate(PROMPTS, 30, sampling=Sampling(**options, seed=seeds)).tokens
    for row, seed in enumerate(seeds):
        alone = decoder_for(MODEL, rule).generate(PROMPTS[row], 30, sampling=Sampling(**options, seed=seed))
        assert alone.tokens[0] == tokens[row]
    same = decoder.generate([PROMPTS[0], PROMPTS[0]], 30, sampling=Sampling(**options, seed=5)).tokens
    assert same[0] == same[1] == tokens[0]


def test_a_stream_goes_on_where_the_answer_does() -> None:
    decoder, sampling = decoder_for(MODEL, RULE), Sampling(temperature=1.0, seed=9)
    expected = decoder.generate(PROMPTS[0], 20, sampling=sampling).tokens[0]
    decoder.prefill(PROMPTS[0])
    parts = [decoder.decode(n, sampling=sampling).tokens[0] for n in (1, 2, 17)]
    assert parts[0] + parts[1] + parts[2] == expected


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=5.0, top_k=1), Sampling(temperature=1e-3), Sampling(temperature=1.0, min_p=1.0)],
    ids=str,
)
def test_what_leaves_one_token_is_greedy(sampling: Sampling) -> None:
    decoder = decoder_for(MODEL, RULE)
    assert decoder.generate(PROMPTS, 20, sampling=sampling).tokens == decoder.generate(PROMPTS, 20).tokens


def test_settings_of_one_answer_do_not_reach_the_next() -> None:
    decoder = decoder_for(MODEL, RULE)
    expected = decoder.generate(PROMPTS, 15, sampling=Sampling(temperature=1.0, seed=3)).tokens
    decoder.generate(PROMPTS, 15, sampling=Sampling(temperature=3.0, seed=4, top_k=2, top_p=0.3, min_p=0.5))
    assert decoder.generate(PROMPTS, 15, sampling=Sampling(temperature=1.0, seed=3)).tokens == expected


@pytest.mark.parametrize(
    "options,match",
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 1.0, "top_k": 0}, "top_k"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p"),
        ({"temperature": 1.0, "min_p": -0.1}, "min_p"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"temperature": 1.0, "top_k": 1.5}, "top_k must be a whole number of at least 1, got 1.5"),
        ({"temperature": 1.0, "top_p": "all"}, "top_p must be a number, got 'all'"),
        ({"temperature": 1.0, "min_p": True}, "min_p must be a number, got True"),
        ({"temperature": 1.0, "seed": "x"}, r"a seed must be a whole number in \[0, 2\*\*63\), got 'x'"),
        ({"temperature": 1.0, "seed": [1, 1.5]}, "a seed must be .* got 1.5"),
        ({"temperature": 1.0, "seed": -1}, "a seed must be .* got -1"),
        ({"temperature": 1.0, "seed": 2**63}, "a seed must be"),
        ({"top_k": 5}, "top_k=5 has no effect"),
        ({"top_p": 0.5}, "top_p=0.5 has no effect"),
        ({"min_p": 0.5}, "min_p=0.5 has no effect"),
        ({"seed": 1}, "seed=1 has no effect"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Sampling(**options)
