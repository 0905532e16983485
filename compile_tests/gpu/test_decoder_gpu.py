"""The decoder on the GPU: right tokens and caches, and two CUDA graphs that are replayed and never wait."""

from __future__ import annotations

import copy
import functools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from compile_tests.oracle import Oracle, Rule
from compile_tests.tiny import (
    assert_same_state,
    conversation_state,
    fill_with_nan,
    random_prompt,
    run_steps,
    spoil_unused_slots,
    tiny_model,
)
from inertiakv import Decoder, EvictionConfig, Sampling
from inertiakv.decoding.batch import READ_EVERY
from inertiakv.models import Transformer

LAZY = EvictionConfig(compression=0.7, refresh=2)
CASES = {
    "lazy-flex": (LAZY, "flex", Sampling()),
    "lazy-dense": (LAZY, "dense", Sampling()),
    "once-flex-sampled": (
        EvictionConfig(compression=0.7, refresh="once", sinks=2, recent=4),
        "flex",
        Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=11),
    ),
    "full-flex": (None, "flex", Sampling()),
}
LENGTHS = (300, 40, 129)
WARM_UP = 3
"""Calls of a graph until it is replayed: one runs as it is, one is recorded."""


@functools.cache
def model_on(device: str, dtype: torch.dtype = torch.float32) -> Transformer:
    """One model for all, so that its graphs serve several tests, with fresh weights in every run."""
    seed = secrets.randbelow(2**31)
    print(f"model of seed {seed}")
    model = tiny_model(seed, layers=3, windows=[None, 60, None], dtype=torch.float64, head_dim=16)
    return model.to(device, dtype)


@functools.cache
def decoder_of(case: str) -> Decoder:
    eviction, backend, _ = CASES[case]
    return Decoder(model_on("cuda"), eviction, attention=backend)


def prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [random_prompt(length, seed + row) for row, length in enumerate(lengths)]


@pytest.mark.parametrize("backend, refresh", [("flex", 2), ("dense", 1)])
def test_every_step_follows_the_method_in_float64(backend: str, refresh: int, seed: int) -> None:
    """Until rounding decides who is evicted, which it may where two utilities are as good as equal."""
    prompt = random_prompt(200, seed)
    rule = Rule(compression=0.8, refresh=refresh)
    oracle = Oracle(copy.deepcopy(model_on("cuda")).cpu(), rule)
    decoder = Decoder(model_on("cuda"), EvictionConfig(**rule.options()), attention=backend)
    oracle.prefill(prompt)
    decoder.prefill(prompt, max_new_tokens=60)
    [[token]] = decoder.decode(1).tokens
    for step in range(50):
        expected = oracle.decode(token).utility
        if step > 0:
            spoil_unused_slots(decoder)
        [[token]] = decoder.decode(1).tokens
        found = conversation_state(decoder).utility()
        if found.keys() != expected.keys():
            [theirs], [ours] = expected.keys() - found.keys(), found.keys() - expected.keys()
            assert found[ours] == pytest.approx(expected[theirs], rel=1e-3), f"step {step}"
            return
        for position, utility in expected.items():
            assert found[position] == pytest.approx(utility, rel=1e-3, abs=1e-7), f"step {step}"


@pytest.mark.parametrize("case", CASES)
def test_compiled_gives_the_tokens_of_eager(case: str, seed: int) -> None:
    eviction, _, sampling = CASES[case]
    compiled = decoder_of(case)
    eager = Decoder(model_on("cuda"), eviction, compile=False, attention="dense")
    for turn in range(2):  # the second time with the buffers and graphs of the first
        expected = eager.generate(prompts(seed + turn), 50, sampling=sampling, eos_token_ids=[3])
        found = compiled.generate(prompts(seed + turn), 50, sampling=sampling, eos_token_ids=[3])
        assert found.tokens == expected.tokens
        for row in range(len(LENGTHS)):
            assert_same_state(conversation_state(compiled, row), conversation_state(eager, row), 1e-4)
        assert (found.stats.graphs.breaks, found.stats.graphs.recompiles) == (0, 0)
        fill_with_nan(compiled)


def test_flex_is_the_default_and_gives_the_tokens_of_dense(seed: int) -> None:
    assert Decoder(model_on("cuda"), LAZY).rule.backend == "flex"
    flex, dense = decoder_of("lazy-flex"), decoder_of("lazy-dense")
    found = flex.generate(prompts(seed), 70, eos_token_ids=[])
    assert found.tokens == dense.generate(prompts(seed), 70, eos_token_ids=[]).tokens
    for row in range(len(LENGTHS)):
        assert_same_state(conversation_state(flex, row), conversation_state(dense, row), 1e-4)


def test_rows_of_a_ragged_batch_are_as_alone(seed: int) -> None:
    together = decoder_of("lazy-flex").generate(prompts(seed), 40, eos_token_ids=[5]).tokens
    single = Decoder(model_on("cuda"), LAZY, compile=False, attention="dense")
    for row, prompt in enumerate(prompts(seed)):
        assert single.generate(prompt, 40, eos_token_ids=[5]).tokens == [together[row]]


@contextmanager
def replays() -> Iterator[list[int]]:
    """Which CUDA graphs are replayed, in order."""
    replayed: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def count(graph: torch.cuda.CUDAGraph) -> None:
        replayed.append(id(graph))
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", count):
        yield replayed


def warm_decoder(seed: int, steps: int) -> Decoder:
    """In the middle of decoding, with room for so many more steps; both graphs have been replayed."""
    decoder = decoder_of("lazy-flex")
    decoder.prefill(prompts(seed), max_new_tokens=2 * WARM_UP + 2 + steps)
    decoder.decode(2 * WARM_UP + 2, eos_token_ids=[])
    return decoder


@torch.no_grad()
def test_two_cuda_graphs_are_replayed_and_no_step_waits(seed: int) -> None:
    decoder = warm_decoder(seed, READ_EVERY)
    torch.cuda.synchronize()
    with replays() as replayed:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_steps(decoder, READ_EVERY)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(replayed) == READ_EVERY, "every step is the replay of one graph"
    assert len(set(replayed)) == 2, "one with scores and one without"


def test_the_next_request_replays_the_same_graphs(seed: int) -> None:
    decoder = warm_decoder(seed, 40)
    compiled = decoder.graphs.stats.compiled
    with replays() as before:
        decoder.decode(8, eos_token_ids=[])
    others = prompts(seed + 9, (290, 33, 111))  # other lengths, the same buckets
    with replays() as after:
        out = decoder.generate(others, 12, eos_token_ids=[])
    assert set(after) == set(before)
    assert (out.stats.graphs.compiled, out.stats.graphs.recompiles) == (compiled, 0)
    eager = Decoder(decoder.model, LAZY, compile=False)
    assert out.tokens == eager.generate(others, 12, eos_token_ids=[]).tokens


def test_the_prompts_cache_is_given_back(seed: int) -> None:
    decoder = decoder_of("lazy-dense")
    decoder.generate(prompts(seed), 20, eos_token_ids=[])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = decoder.generate(prompts(seed + 5), 20, eos_token_ids=[])
    assert torch.cuda.memory_allocated() <= before + 2**16
    assert out.stats.cache_bytes == 2 * 3 * 3 * 2 * 128 * 16 * 4  # k and v, layers, rows, heads, slots, dim
