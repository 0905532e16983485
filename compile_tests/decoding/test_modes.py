"""Decoders under the modes of other people's programs: inference_mode, no_grad, autocast."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from compile_tests.tiny import decoder_for, random_prompt, tiny_model
from inertiakv import EvictionConfig

MODEL = tiny_model(23, dtype=torch.float32)
RULE = EvictionConfig(compression=0.5, refresh=2)
PROMPT, TURN = random_prompt(40), random_prompt(9, seed=1)
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "none": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("compiled", [False, True])
def test_requests_in_any_order_of_modes(compiled: bool) -> None:
    expected = decoder_for(MODEL, RULE).generate(PROMPT, 8).tokens
    with torch.inference_mode():
        decoder = decoder_for(MODEL, RULE, compile=compiled)
    for order in itertools.permutations(MODES, 3):
        for name in order:
            with MODES[name]():
                assert decoder.generate(PROMPT, 8).tokens == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_goes_on_under_another_mode(mode: str, tmp_path: Path) -> None:
    plain = decoder_for(MODEL, RULE)
    plain.generate(PROMPT, 8)
    plain.extend(TURN)
    expected = plain.decode(8).tokens
    for first, second in ((nullcontext, MODES[mode]), (MODES[mode], nullcontext)):
        decoder, reader, later = (decoder_for(MODEL, RULE) for _ in range(3))
        with first():
            reader.prefill(PROMPT)
        with second():
            decoder.take_prompt(reader)
            decoder.decode(8)
        with first():
            decoder.extend(TURN)
            decoder.save(tmp_path / "saved")
            later.load(tmp_path / "saved")
        with second():
            assert later.decode(8).tokens == expected
            assert decoder.decode(8).tokens == expected


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_made_in_inference_mode(compiled: bool) -> None:
    with torch.inference_mode():
        model = tiny_model(23, dtype=torch.float32)
    expected = decoder_for(MODEL, RULE).generate(PROMPT, 8).tokens
    assert decoder_for(model, RULE, compile=compiled).generate(PROMPT, 8).tokens == expected
