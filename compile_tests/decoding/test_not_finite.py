"""Rows whose logits are not finite end with a reason of their own, and the other rows go on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from compile_tests.tiny import VOCAB, decoder_for, random_prompt, tiny_model
from inertiakv import EvictionConfig, Sampling
from inertiakv.models import Transformer

RULE = EvictionConfig(compression=0.5, refresh=2)
BAD = VOCAB - 1
"""The token whose embedding is not a number."""


def broken_model(value: float = float("nan")) -> Transformer:
    model = tiny_model(27, dtype=torch.float32)
    model.embed_tokens.weight.data[BAD] = value
    assert model.lm_head is not None
    model.lm_head.weight.data[BAD] = 0  # which is never the likeliest
    return model


def prompt(seed: int) -> list[int]:
    return [min(token, BAD - 1) for token in random_prompt(30, seed=seed)]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_prompt_with_a_bad_token(value: float, sampling: Sampling, caplog: Any) -> None:
    model = broken_model(value)
    decoder = decoder_for(model, RULE)
    good = [decoder.generate(prompt(seed), 8, sampling=sampling).tokens[0] for seed in (0, 1)]
    rows = [prompt(0), [*prompt(2)[:-1], BAD], prompt(1)]
    with caplog.at_level(logging.WARNING, "inertiakv"):
        out = decoder.generate(rows, 8, sampling=sampling)
    assert out.tokens == [good[0], [], good[1]]
    assert out.finish_reasons == ["length", "not_finite", "length"]
    assert out.failures() == ["logits are not finite in row 1 from token 1 on"]
    assert [r.message for r in caplog.records if r.name == "inertiakv.decoder"] == out.failures()
    alone = decoder.generate(rows[1], 8, sampling=sampling)
    assert (alone.tokens, alone.finish_reasons) == ([[]], ["not_finite"])
    assert list(decoder.stream(rows[1], 8, sampling=sampling)) == []


@pytest.mark.parametrize("compiled", [False, True])
def test_an_answer_that_comes_upon_a_bad_token(compiled: bool) -> None:
    """In the middle of compiled steps, whose tokens are read later."""
    model = broken_model()
    plain = decoder_for(model, RULE)
    expected = [plain.generate(prompt(seed), 12).tokens[0] for seed in (0, 1)]
    others = [*prompt(0), *prompt(1), *expected[1]]
    at = next(i for i in range(3, 12) if expected[0][i] not in [*others, *expected[0][:i]])
    model.embed_tokens.weight.data[expected[0][at]] = float("nan")
    decoder = decoder_for(model, RULE, compile=compiled)
    for _ in range(3):
        out = decoder.generate([prompt(0), prompt(1)], 12)
        assert out.tokens == [expected[0][: at + 1], expected[1]]
        assert out.failures() == [f"logits are not finite in row 0 from token {at + 2} on"]
    decoder.extend([[3], [4]])
    assert decoder.decode(2).finish_reasons == ["not_finite", "length"]
