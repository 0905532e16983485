"""The product against the method written out: tokens, kept sets, utilities, K and V, step by step."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from compile_tests.oracle import Oracle, Rule
from compile_tests.tiny import conversation_state, decoder_for, random_prompt, tiny_model
from inertiakv import Decoder, EvictionConfig
from models import Transformer

STEPS = 60
TOLERANCE = 1e-9
GROUPINGS = [(1, 1), (2, 1), (3, 3), (4, 2), (6, 2), (7, 1)]

cached_model = functools.lru_cache(maxsize=None)(tiny_model)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    aggregation = draw(st.sampled_from(["ema", "ema", "ema", "cumulative", "single"]))
    sinks, recent = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    absolute = draw(st.booleans())
    return Rule(
        aggregation=aggregation,
        alpha=draw(st.sampled_from([0.0, 0.3, 0.8, 0.95])),
        coupling=draw(st.sampled_from(["layer_temporal", "temporal", "layer"])),
        step_alpha=draw(st.sampled_from([None, None, 0.0, 0.5, 0.9])),
        refresh=draw(st.sampled_from([1, 1, 2, 3, 4, 7, 0])),
        compression=None if absolute else draw(st.sampled_from([0.0, 0.5, 0.8, 0.9])),
        budget=draw(st.integers(max(1, sinks + recent), 45)) if absolute else None,
        sinks=sinks,
        recent=recent,
    )


@st.composite
def models(draw: st.DrawFn) -> Transformer:
    layers = draw(st.integers(1, 3))
    heads, kv_heads = draw(st.sampled_from(GROUPINGS))
    window = draw(st.sampled_from([None, None, 4, 16, 40]))
    slides = [draw(st.booleans()) for _ in range(layers)]
    windows = None if window is None else tuple(window if slide else None for slide in slides)
    seed = draw(st.integers(0, 3))
    return cached_model(seed, layers=layers, heads=heads, kv_heads=kv_heads, windows=windows)


def assert_agrees(decoder: Decoder, oracle: Oracle, row: int = 0) -> None:
    """The same cache as the oracle's: kept positions, utilities, and K and V of every layer."""
    state = conversation_state(decoder, row)
    assert state.kept == sorted(oracle.utility)
    wanted_N = torch.tensor([oracle.utility[position] for position in state.kept], dtype=torch.float64)
    torch.testing.assert_close(state.utility_N, wanted_N, rtol=TOLERANCE, atol=1e-12)
    for mine_LGND, theirs in ((state.k_LGND, oracle.k), (state.v_LGND, oracle.v)):
        wanted_LNGD = np.array([[layer[position] for position in state.kept] for layer in theirs])
        wanted_LGND = torch.from_numpy(wanted_LNGD).transpose(1, 2)
        torch.testing.assert_close(mine_LGND, wanted_LGND, rtol=0, atol=TOLERANCE)


def follow(decoder: Decoder, oracle: Oracle, token: int, steps: int) -> list[int] | None:
    """Compare an answer that begins with `token`, one decode step at a time: its tokens, or None where
    rounding alone decided what was evicted, so that the two may part."""
    answer = [token]
    assert decoder.decode(1).tokens == [[token]]
    for _ in range(steps):
        refreshes = decoder.stats.refreshes if len(answer) > 1 else None
        step = oracle.decode(answer[-1])
        if step.unclear:
            return None
        assert decoder.decode(1).tokens == [[step.token]]
        assert_agrees(decoder, oracle)
        if refreshes is not None:
            assert decoder.stats.refreshes - refreshes == step.refreshed
        answer.append(step.token)
    return answer


@settings(max_examples=100)
@given(rule=rules(), model=models(), length=st.integers(8, 70), seed=st.integers(0, 1000))
def test_every_rule_follows_the_method_step_by_step(
    rule: Rule, model: Transformer, length: int, seed: int
) -> None:
    if rule.sinks + rule.recent > rule.budget_for(length):
        with pytest.raises(ValueError, match="protect more"):
            decoder_for(model, EvictionConfig(**rule.options())).prefill(random_prompt(length, seed))
        return
    prompt = random_prompt(length, seed)
    oracle, decoder = Oracle(model, rule), decoder_for(model, EvictionConfig(**rule.options()))
    first = oracle.prefill(prompt)
    decoder.prefill(prompt, max_new_tokens=STEPS + 1)
    answer = follow(decoder, oracle, first, STEPS)
    event("compared to the end" if answer else "rounding decided")
    if answer:
        assert decoder.stats.kept_tokens == [len(oracle.utility)]
        assert decoder.stats.sequence_tokens == [length + STEPS]


@settings(max_examples=25)
@given(
    rule=rules(),
    model=models(),
    lengths=st.lists(st.integers(8, 60), min_size=2, max_size=4),
    chunk=st.sampled_from([1, 7, 16, 2048]),
)
def test_every_row_of_a_ragged_batch_follows_the_method(
    rule: Rule, model: Transformer, lengths: list[int], chunk: int
) -> None:
    if any(rule.sinks + rule.recent > rule.budget_for(length) for length in lengths):
        return
    prompts = [random_prompt(length, seed) for seed, length in enumerate(lengths)]
    decoder = decoder_for(model, EvictionConfig(**rule.options()), prefill_chunk=chunk)
    tokens = decoder.generate(prompts, 25).tokens
    for row, prompt in enumerate(prompts):
        oracle = Oracle(model, rule)
        answer, unclear = [oracle.prefill(prompt)], False
        for _ in range(24):
            step = oracle.decode(answer[-1])
            unclear |= step.unclear
            answer.append(step.token)
        if not unclear:
            assert tokens[row] == answer
            assert_agrees(decoder, oracle, row)


@settings(max_examples=25)
@given(
    rule=rules(),
    model=models(),
    turns=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_further_turns_follow_the_method(
    rule: Rule, model: Transformer, turns: Sequence[int], seed: int
) -> None:
    prompt = random_prompt(40, seed)
    if rule.sinks + rule.recent > rule.budget_for(40):
        return
    oracle, decoder = Oracle(model, rule), decoder_for(model, EvictionConfig(**rule.options()))
    token = oracle.prefill(prompt)
    decoder.prefill(prompt)
    answer = follow(decoder, oracle, token, 5)
    for number, length in enumerate(turns):
        if answer is None:
            return
        turn = random_prompt(length, seed + number + 1)
        step = oracle.extend([answer[-1], *turn])
        decoder.extend(turn)
        if step.unclear:
            return
        assert_agrees(decoder, oracle)
        answer = follow(decoder, oracle, step.token, 5)


def test_the_full_cache_follows_the_method() -> None:
    model, prompt = cached_model(5, layers=3), random_prompt(50, 5)
    oracle, decoder = Oracle(model, None), decoder_for(model, None)
    answer = [oracle.prefill(prompt)]
    for _ in range(STEPS):
        answer.append(oracle.decode(answer[-1]).token)
    assert decoder.generate(prompt, STEPS + 1).tokens == [answer]
    assert conversation_state(decoder).kept == list(range(50 + STEPS))
    turn = random_prompt(9, 6)
    decoder.extend(turn)
    assert decoder.decode(1).tokens == [[oracle.extend([answer[-1], *turn]).token]]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("refresh", [1, 4])
def test_float32_chooses_the_tokens_of_the_method(seed: int, refresh: int) -> None:
    prompt, rule = random_prompt(64, seed), Rule(compression=0.75, refresh=refresh)
    oracle = Oracle(tiny_model(seed, layers=3), rule)
    answer = [oracle.prefill(prompt)]
    for _ in range(40):
        answer.append(oracle.decode(answer[-1]).token)
    decoder = decoder_for(tiny_model(seed, layers=3, dtype=torch.float32), EvictionConfig(**rule.options()))
    assert decoder.generate(prompt, 41).tokens == [answer]
    assert conversation_state(decoder).kept == sorted(oracle.utility)


class Talk:
    """One row's conversation, of which each token of an answer is fed when the next one is asked for."""

    def __init__(self, model: Transformer, rule: Rule | None, prompt: list[int]) -> None:
        self.oracle = Oracle(model, rule)
        self.next: int | None = self.oracle.prefill(prompt)
        self.last = self.next
        self.ended = self.unclear = False

    def decode(self, count: int, eos: list[int]) -> list[int]:
        answer: list[int] = []
        while len(answer) < count and not self.ended:
            if self.next is None:
                self._feed()
            assert self.next is not None
            self.last, self.next = self.next, None
            answer.append(self.last)
            self.ended = self.last in eos
        budget = self.oracle.budget
        overfull = budget is not None and len(self.oracle.utility) > budget
        if budget is not None and self.oracle.step == 0 and (overfull or not self.ended):
            self._feed()  # an answer of one token: its first step brings the cache to budget
        return answer

    def _feed(self) -> None:
        step = self.oracle.decode(self.last)
        self.next, self.unclear = step.token, self.unclear or step.unclear

    def extend(self, turn: list[int]) -> None:
        step = self.oracle.extend(turn if self.next is not None else [self.last, *turn])
        self.next, self.unclear, self.ended = step.token, self.unclear or step.unclear, False


actions = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, 7)),
    st.tuples(st.just("extend"), st.integers(1, 30)),
    st.tuples(st.just("reload"), st.just(0)),
)


@settings(max_examples=60)
@given(
    rule=st.one_of(st.none(), rules()),
    model=models(),
    lengths=st.lists(st.integers(8, 60), min_size=1, max_size=3),
    eos=st.lists(st.integers(0, 60), max_size=5),
    script=st.lists(actions, min_size=1, max_size=6),
)
def test_conversations_follow_the_method(
    rule: Rule | None,
    model: Transformer,
    lengths: list[int],
    eos: list[int],
    script: list[tuple[str, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if rule is not None and any(rule.sinks + rule.recent > rule.budget_for(length) for length in lengths):
        return
    config = None if rule is None else EvictionConfig(**rule.options())
    prompts = [random_prompt(length, seed) for seed, length in enumerate(lengths)]
    talks = [Talk(model, rule, prompt) for prompt in prompts]
    decoder = decoder_for(model, config)
    decoder.prefill(prompts)
    for number, (action, size) in enumerate(script):
        if action == "decode":
            tokens = decoder.decode(size, eos_token_ids=eos).tokens
            expected = [talk.decode(size, eos) for talk in talks]
        elif action == "extend":
            turns = [random_prompt(max(1, size - 9 * row), 50 + number + row) for row in range(len(talks))]
            decoder.extend(turns)
            for talk, turn in zip(talks, turns, strict=True):
                talk.extend(turn)
        else:
            path = tmp_path_factory.mktemp("saved") / "conversation"
            decoder.save(path)
            decoder = decoder_for(model, config)
            decoder.load(path)
        if any(talk.unclear for talk in talks):
            return
        if action == "decode":
            assert tokens == expected
        for row, talk in enumerate(talks):
            assert_agrees(decoder, talk.oracle, row)


@pytest.mark.slow
@pytest.mark.parametrize(
    "eviction",
    [
        EvictionConfig(compression=0.6, refresh=4, sinks=1, recent=2),
        EvictionConfig(budget=20, aggregation="cumulative"),
    ],
    ids=["lazy ema", "cumulative"],
)
def test_a_compiled_decoder_chooses_the_tokens_of_an_eager_one(eviction: EvictionConfig) -> None:
    model = tiny_model(1, dtype=torch.float32)
    prompts = [random_prompt(length, length) for length in (50, 9, 131)]
    eager = decoder_for(model, eviction)
    compiled = decoder_for(model, eviction, compile=True)
    expected = eager.generate(prompts, 40)
    for _ in range(2):
        out = compiled.generate(prompts, 40)
        assert out.tokens == expected.tokens
        assert out.stats.kept_tokens == expected.stats.kept_tokens
        assert out.stats.refreshes == expected.stats.refreshes
        for row in range(3):
            assert conversation_state(compiled, row).kept == conversation_state(eager, row).kept
    assert out.stats.graphs.breaks == out.stats.graphs.recompiles == 0
