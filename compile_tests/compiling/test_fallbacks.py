"""Where torch lacks what graphs are kept or replayed with, steps run as compiled, and the log says why."""

from __future__ import annotations

import logging

import pytest
import torch

from compile_tests.tiny import random_prompts, tiny_model
from inertiakv import Decoder, EvictionConfig
from inertiakv.compiling.replay import _Module


@pytest.mark.usefixtures("nothing_compiled_yet")
def test_a_torch_that_cannot_load_compiled_functions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = tiny_model(3, layers=1, dtype=torch.float32), random_prompts((30,))
    rule = EvictionConfig(budget=8, refresh=2)
    expected = Decoder(model, rule, compile=False).generate(prompts, 6).tokens
    monkeypatch.delattr(torch.compiler, "load_compiled_function")
    with caplog.at_level(logging.INFO, "inertiakv"):
        decoder = Decoder(model, rule)
        out = decoder.generate(prompts, 6)
    assert out.tokens == expected
    assert out.stats.graphs.stored == 0
    assert "without torch.compiler.load_compiled_function" in caplog.text


def test_modules_that_are_not_replayed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "inertiakv"):
        assert _Module.of([]) is None
        assert _Module.of([logging]) is None
    assert "0 modules were compiled" in caplog.text
    assert "has no class Runner" in caplog.text
