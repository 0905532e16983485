"""What must hold of a decoder on one prompt, whatever the rule."""

from __future__ import annotations

import math

import pytest
import torch

from compile_tests.oracle import Oracle
from compile_tests.oracle_rules import Rule
from compile_tests.tiny import (
    Spy,
    assert_same_state,
    conversation_state,
    decoder_for,
    fill_with_nan,
    random_prompt,
    set_states,
    tiny_model,
)
from inertiakv import POLICIES, EvictionConfig, policy
from inertiakv.models import Transformer

MODEL = tiny_model(7)
EVICTING = [name for name, config in POLICIES.items() if config is not None]


@pytest.mark.parametrize("name, budget", [("inertiakv", 1), ("h2o", 63), *((name, 40) for name in EVICTING)])
def test_positions_are_those_of_the_whole_sequence_whatever_was_evicted(name: str, budget: int) -> None:
    spy, rule = Spy(MODEL), policy(name)
    assert rule is not None
    decoder = decoder_for(spy, policy(name, budget=budget), prefill_chunk=24)
    tokens = decoder.generate(random_prompt(64), 21).tokens[0]
    prompt, answer = spy.positions[:3], spy.positions[3:]
    assert [p for chunk in prompt for p in chunk[0]] == list(range(64))
    if rule.scorer == "reconstruction":
        assert answer.pop(0) == [list(range(64, 128))]
    elif rule.evict_at == "prompt":
        assert answer.pop(0) == [list(range(max(0, 64 - rule.window), 64))]
    if rule.draft:
        for _ in range(rule.drafts):
            first, *steps = (answer.pop(0) for _ in range(rule.draft))
            assert first in ([[64]], [list(range(64, 65 + rule.draft))])
            assert steps == [[[64 + t]] for t in range(1, rule.draft)]
        assert answer[0] == [list(range(64, 65 + rule.draft))]
        answer[0], spy.tokens[-20] = [[64]], [spy.tokens[-20][0][:1]]
    assert answer == [[[64 + t - 1]] for t in range(1, 21)]
    assert spy.tokens[-20:] == [[[token]] for token in tokens[:-1]]
    assert decoder.stats.sequence_tokens == [84]


@pytest.mark.parametrize("steps", [1, 4, 5, 9])
@pytest.mark.parametrize("refresh", [1, 2, 4, "once"])
@pytest.mark.parametrize("compression", [0.8, 0.0], ids=["evicting at once", "later"])
def test_refreshes_are_those_of_the_schedule(steps: int, refresh: int | str, compression: float) -> None:
    decoder = decoder_for(MODEL, EvictionConfig(compression=compression, refresh=refresh))
    stats = decoder.generate(random_prompt(30), steps + 1).stats
    assert stats.refreshes == (1 if refresh == "once" else math.ceil(steps / int(refresh)))


@pytest.mark.parametrize("refresh", [4, "once"])
@pytest.mark.parametrize("budget", [69, 70, 10**6])
def test_a_budget_for_everything_is_the_full_cache_bit_for_bit(budget: int, refresh: int | str) -> None:
    full, roomy = (
        decoder_for(MODEL, config) for config in (None, EvictionConfig(budget=budget, refresh=refresh))
    )
    expected, out = (decoder.generate(random_prompt(50), 20) for decoder in (full, roomy))
    assert out.tokens == expected.tokens
    assert not out.stats.evicted
    assert out.stats.kept_tokens == [69]
    mine, theirs = conversation_state(roomy), conversation_state(full)
    assert mine.kept == theirs.kept == list(range(69))
    assert torch.equal(mine.k_LGND, theirs.k_LGND)
    assert torch.equal(mine.v_LGND, theirs.v_LGND)


@pytest.mark.parametrize("new_tokens", [1, 2, 30])
@pytest.mark.parametrize("budget", [1, 20, 49, 50, 51, 60])
def test_no_more_than_the_budget_is_kept(budget: int, new_tokens: int) -> None:
    decoder = decoder_for(MODEL, EvictionConfig(budget=budget))
    for seed in range(2):  # a request does not leave the next one with the full cache
        stats = decoder.generate(random_prompt(50, seed), new_tokens).stats
        assert stats.kept_tokens[0] <= budget
        assert stats.kept_tokens[0] == min(budget, stats.sequence_tokens[0])
        assert stats.evicted == (stats.sequence_tokens[0] > budget)


def test_the_first_token_sees_the_whole_prompt() -> None:
    prompt = random_prompt(90)
    full = decoder_for(MODEL, None).generate(prompt, 2).tokens
    assert decoder_for(MODEL, EvictionConfig(budget=1)).generate(prompt, 2).tokens == full


def written_out(
    model: Transformer, rule: Rule | None, prompt: list[int], new_tokens: int
) -> tuple[list[int], list[int]]:
    """The method's own answer, and the positions that it keeps."""
    oracle = Oracle(model, rule)
    answer = [oracle.prefill(prompt)]
    while len(answer) < new_tokens:
        answer.append(oracle.decode(answer[-1]).token)
    return answer, oracle.kept()


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129])
@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_prompts_about_as_long_as_budget_and_buffers(length: int, surplus: int) -> None:
    rule = Rule(budget=max(1, length + surplus), refresh=2)
    answer, kept = written_out(MODEL, rule, random_prompt(length), 6)
    decoder = decoder_for(MODEL, EvictionConfig(**rule.options()))
    assert decoder.generate(random_prompt(length), 6).tokens == [answer]
    assert conversation_state(decoder).kept == kept


@pytest.mark.parametrize("length", [126, 127, 128])
def test_answers_that_end_about_where_a_buffer_does(length: int) -> None:
    most = 130 if length == 127 else 3
    answer, _ = written_out(MODEL, None, random_prompt(length), most)
    for new_tokens in (1, 2, 3, most):
        decoder = decoder_for(MODEL, None)
        assert decoder.generate(random_prompt(length), new_tokens).tokens == [answer[:new_tokens]]


@pytest.mark.parametrize("length", [11, 12, 13, 24])
@pytest.mark.parametrize("rule", [None, Rule(compression=0.5), Rule(budget=12, refresh=4)])
def test_prompts_about_as_long_as_a_sliding_window(length: int, rule: Rule | None) -> None:
    model = tiny_model(4, windows=(12, None))
    decoder = decoder_for(model, None if rule is None else EvictionConfig(**rule.options()))
    expected, _ = written_out(model, rule, random_prompt(length), 21)
    assert decoder.generate(random_prompt(length), 21).tokens == [expected]


@pytest.mark.parametrize("chunk", [1, 7, 64, 99, 100, 101])
def test_the_size_of_prefill_chunks_changes_nothing(chunk: int) -> None:
    eviction = EvictionConfig(compression=0.8)
    whole, parts = decoder_for(MODEL, eviction), decoder_for(MODEL, eviction, prefill_chunk=chunk)
    seen = []
    out = parts.generate(random_prompt(100), 20, progress=lambda done, total: seen.append((done, total)))
    assert out.tokens == whole.generate(random_prompt(100), 20).tokens
    assert_same_state(conversation_state(parts), conversation_state(whole), tolerance=1e-10)
    assert seen == [(min(100, chunk * i), 100) for i in range(1, math.ceil(100 / chunk) + 1)]


@pytest.mark.parametrize("name", POLICIES)
def test_answering_in_parts_is_answering_at_once(name: str) -> None:
    decoder = decoder_for(MODEL, None if name == "full" else policy(name, budget=36))
    expected = decoder.generate(random_prompt(50), 20).tokens[0]
    assert decoder.cache is not None
    states = set_states(decoder.cache)
    decoder.prefill(random_prompt(50))
    parts = [decoder.decode(n).tokens[0] for n in (1, 1, 5, 13)]
    assert [token for part in parts for token in part] == expected
    for state, other in zip(set_states(decoder.cache), states, strict=True):
        assert_same_state(state, other, tolerance=1e-10)


def test_streaming_is_generating() -> None:
    decoder = decoder_for(MODEL, EvictionConfig(compression=0.8))
    prompts = [random_prompt(50), random_prompt(9, 1)]
    single, batch = decoder.generate(prompts[0], 20), decoder.generate(prompts, 20)
    assert list(decoder.stream(prompts[0], 20)) == single.tokens[0]
    steps = list(decoder.stream(prompts, 20))
    assert [[step[row] for step in steps] for row in range(2)] == batch.tokens


@pytest.mark.parametrize("taken", [1, 2, 7])
def test_a_stream_that_is_left_leaves_the_cache_within_budget_and_can_be_continued(taken: int) -> None:
    decoder = decoder_for(MODEL, EvictionConfig(budget=20))
    expected = decoder.generate(random_prompt(50), 15).tokens[0]
    stream = decoder.stream(random_prompt(50), 15)
    start = [next(stream) for _ in range(taken)]
    stream.close()
    assert decoder.stats.kept_tokens == [20]
    assert start + decoder.decode(15 - taken).tokens[0] == expected


@pytest.mark.parametrize("eviction", [None, EvictionConfig(budget=20, refresh=2), EvictionConfig(budget=80)])
def test_a_request_is_not_changed_by_nan_in_its_buffers(eviction: EvictionConfig | None) -> None:
    decoder = decoder_for(MODEL, eviction)
    request = [random_prompt(30, 3), random_prompt(52, 4)]
    expected = decoder.generate(request, 20).tokens
    fill_with_nan(decoder)
    assert decoder.cache is not None
    decoder.cache.retention[0].utility_BXN.fill_(torch.nan)
    assert decoder.generate(request, 20).tokens == expected


def test_flat_attention_without_memory_keeps_the_newest_tokens() -> None:
    model = tiny_model(2)
    for layer in model.layers:
        layer.self_attn.q_proj.weight.zero_()
    decoder = decoder_for(model, EvictionConfig(budget=10, aggregation="single"))
    decoder.generate(random_prompt(40), 31)
    assert conversation_state(decoder).kept == list(range(60, 70))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_keeps_its_scores_in_float32_and_its_promises(dtype: torch.dtype) -> None:
    decoder = decoder_for(tiny_model(7, dtype=dtype), EvictionConfig(budget=20, sinks=3, recent=4, refresh=2))
    out = decoder.generate([random_prompt(90), random_prompt(30, 1)], 40)
    assert out.stats.kept_tokens == [20, 20]
    assert decoder.cache is not None
    assert decoder.cache.retention[0].utility_BXN.dtype == torch.float32
    for row, length in enumerate((129, 69)):
        state = conversation_state(decoder, row)
        assert state.kept[:3] == [0, 1, 2]
        assert state.kept[-4:] == list(range(length - 4, length))
        assert state.k_LGND.dtype == dtype
        assert all(table.isfinite().all() for table in (state.utility_N, state.k_LGND, state.v_LGND))
