"""Decoders in programs with threads: each answer is the one that its prompt gets alone."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from compile_tests.tiny import decoder_for, random_prompt, row_state, tiny_model
from inertiakv import EvictionConfig

MODEL = tiny_model(21, dtype=torch.float32)
RULE = EvictionConfig(compression=0.5, refresh=2)
PROMPTS = [random_prompt(40 + 7 * seed, seed=seed) for seed in range(6)]


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """What the jobs return, or the errors that they end with."""
    results: list[Any] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("compiled", [False, True])
def test_threads_that_share_a_decoder_wait_for_each_other(compiled: bool) -> None:
    if compiled:
        torch.compile(torch.abs)  # which skips the test here, and not in a thread
    decoder = decoder_for(MODEL, RULE, compile=compiled)
    expected = [decoder_for(MODEL, RULE).generate(prompt, 12).tokens for prompt in PROMPTS]
    jobs = [lambda prompt=prompt: decoder.generate(prompt, 12).tokens for prompt in PROMPTS]
    assert in_threads(*jobs) == expected
    assert in_threads(*jobs) == expected


def test_decoders_of_one_model_compile_and_run_side_by_side() -> None:
    """At different shapes, so that one compiles while the other one runs."""
    torch.compile(torch.abs)
    rules = [RULE, EvictionConfig(budget=200), EvictionConfig(budget=600), None]
    decoders = [decoder_for(MODEL, rule, compile=True) for rule in rules]
    prompts = [random_prompt(40 + 300 * i, seed=i) for i in range(4)]
    expected = [decoder_for(MODEL, r).generate(p, 9).tokens for r, p in zip(rules, prompts, strict=True)]

    def answers(i: int) -> list[Any]:
        return [decoders[i].generate(prompts[i], 9).tokens for _ in range(3)]

    results = in_threads(*[lambda i=i: answers(i) for i in range(4)])
    assert results == [[tokens] * 3 for tokens in expected]
    assert all(decoder.graphs.stats.recompiles == 0 for decoder in decoders)
    assert gc.isenabled()


def test_a_stream_ends_with_an_error_once_another_call_has_begun() -> None:
    decoder = decoder_for(MODEL, RULE)
    expected = decoder.generate(PROMPTS[1], 12).tokens
    stream = decoder.stream(PROMPTS[0], 30)
    first = [next(stream) for _ in range(5)]
    assert first == decoder_for(MODEL, RULE).generate(PROMPTS[0], 5).tokens[0]
    (answer,) = in_threads(lambda: decoder.generate(PROMPTS[1], 12).tokens)
    assert answer == expected
    with pytest.raises(ValueError, match="gone on without it"):
        next(stream)
    assert decoder.decode(5).tokens == [decoder_for(MODEL, RULE).generate(PROMPTS[1], 17).tokens[0][12:]]


def test_streams_in_threads_are_whole_or_end_with_the_error() -> None:
    decoder = decoder_for(MODEL, RULE)
    expected = [decoder_for(MODEL, RULE).generate(prompt, 20).tokens[0] for prompt in PROMPTS]
    jobs = [lambda prompt=prompt: list(decoder.stream(prompt, 20)) for prompt in PROMPTS]
    results = in_threads(*jobs)
    assert any(isinstance(result, list) for result in results)
    for result, tokens in zip(results, expected, strict=True):
        if isinstance(result, list):
            assert result == tokens
        else:
            assert isinstance(result, ValueError)
            assert "gone on without it" in str(result)


def test_a_stream_that_is_dropped_does_nothing_in_its_finalizer() -> None:
    """It might run in any thread, at any time. The cache is evicted when it is asked for."""
    decoder = decoder_for(MODEL, RULE)
    stream = decoder.stream(PROMPTS[0], 30)
    next(stream)
    conversation = decoder._conversation
    assert conversation is not None
    del stream
    gc.collect()
    assert conversation.first_step_is_due
    assert decoder.stats.kept_tokens == [20]
    assert decoder.cache is not None
    whole = decoder_for(MODEL, RULE)
    whole.generate(PROMPTS[0], 1)
    assert whole.cache is not None
    assert row_state(decoder.cache).kept == row_state(whole.cache).kept


def test_callbacks_cannot_use_the_decoder_that_calls_them() -> None:
    decoder = decoder_for(MODEL, RULE)
    for options in (
        {"stop": lambda *_: bool(decoder.generate(PROMPTS[1], 2))},
        {"progress": lambda *_: decoder.prefill(PROMPTS[1])},
    ):
        with pytest.raises(ValueError, match="a callback cannot use the decoder that calls it"):
            decoder.generate(PROMPTS[0], 5, **options)  # type: ignore[arg-type]
    seen: list[float] = []

    def stop(_: int, tokens: list[int]) -> bool:
        seen.append(decoder.stats.prompt_tokens[0])
        return len(tokens) == 3

    assert len(decoder.generate(PROMPTS[0], 5, stop=stop).tokens[0]) == 3
    assert seen == [40] * 3


def test_prompts_are_taken_over_in_both_directions_at_once() -> None:
    one, other = decoder_for(MODEL, RULE), decoder_for(MODEL, RULE)

    def take(mine: Any, theirs: Any) -> None:
        for _ in range(20):
            mine.prefill(PROMPTS[0])
            try:
                mine.take_prompt(theirs)
            except ValueError as error:
                assert "no conversation yet" in str(error)  # noqa: PT017

    assert in_threads(lambda: take(one, other), lambda: take(other, one)) == [None, None]


def test_asyncio() -> None:
    decoder = decoder_for(MODEL, RULE)
    expected = [decoder_for(MODEL, RULE).generate(prompt, 12).tokens for prompt in PROMPTS]

    async def answers() -> list[Any]:
        return await asyncio.gather(
            *[asyncio.to_thread(lambda p=prompt: decoder.generate(p, 12).tokens) for prompt in PROMPTS]
        )

    assert asyncio.run(answers()) == expected
