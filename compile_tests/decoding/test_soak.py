"""What a service meets that runs for weeks: many shapes, rules and batch sizes."""

from __future__ import annotations

import gc
import os
import random
from typing import Any

import psutil
import pytest
import torch

from compile_tests.tiny import decoder_for, random_prompts, tiny_model
from inertiakv import EvictionConfig, policy
from inertiakv.compiling import graphs
from inertiakv.compiling.graphs import Graphs
from inertiakv.decoding import buffers, runtime

RULES = [
    EvictionConfig(compression=0.5, refresh=2),
    EvictionConfig(budget=20, alpha=0.3),
    policy("tova", compression=0.7),
    policy("streaming_llm", budget=30),
    None,
]


def test_of_graphs_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    calls: list[str] = []
    kept = Graphs(True, torch.device("cpu"), on_compile=calls.append)

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    for name in ("a", "b", "a", "c", "a", "b"):  # "b" is used last when "c" comes
        assert kept.run((name,), double, torch.ones(3), capture=False).tolist() == [2.0] * 3
    assert calls == ["a", "b", "c", "b"]
    assert len(kept._compiled) == 2


def test_of_rules_and_batch_sizes_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MAX_RULES", 2)
    monkeypatch.setattr(buffers, "MAX_BATCH_STATES", 2)
    model = tiny_model(29, dtype=torch.float32)
    decoder = decoder_for(model, None)
    for _ in range(2):
        for rule in RULES:
            decoder.use(rule)
            for batch in (1, 2, 3):
                prompts = random_prompts([30, 40, 50][:batch])
                expected = decoder_for(model, rule).generate(prompts, 4).tokens
                assert decoder.generate(prompts, 4).tokens == expected
    assert len(decoder._runtime._rules) == 2
    assert len(decoder._runtime.buffers._batch_states) == 2


@pytest.mark.slow
def test_two_thousand_requests_leave_memory_flat() -> None:
    draw = random.Random(0)
    model = tiny_model(29, dtype=torch.float32)
    decoder, oracle = decoder_for(model, None, compile=True), decoder_for(model, None)
    after_300 = 0

    def resident() -> int:
        gc.collect()
        return int(psutil.Process(os.getpid()).memory_info().rss)

    def request(number: int) -> None:
        rule = draw.choice(RULES)
        prompts = random_prompts([draw.randint(1, 100) for _ in range(draw.randint(1, 2))])
        decoder.use(rule)
        tokens: Any = decoder.generate(prompts, draw.randint(1, 8)).tokens
        if number % 50 == 0:
            oracle.use(rule)
            new = max(map(len, tokens))
            assert tokens == oracle.generate(prompts, new).tokens

    for number in range(2000):
        request(number)
        if number == 300:
            after_300 = resident()
    assert len(decoder.graphs._compiled) <= graphs.MAX_GRAPHS
    assert decoder.graphs.stats.recompiles == 0
    assert resident() < 1.02 * after_300
