"""The product against the method written out: tokens, kept sets, utilities, K and V, step by step."""

from __future__ import annotations

import functools
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

from compile_tests.oracle import Arbiter, Oracle
from compile_tests.oracle_rules import Draw, Key, Rule
from compile_tests.tiny import (
    conversation_state,
    decoder_for,
    random_prompt,
    random_prompts,
    random_scores,
    set_states,
    tiny_model,
)
from inertiakv import Decoder, EvictionConfig
from inertiakv.config import OF_ATTENTION, ScorerName
from inertiakv.models import Transformer

STEPS = 25
TOLERANCE = 1e-9
GROUPINGS = [(1, 1), (2, 1), (3, 3), (4, 2), (6, 2), (7, 1)]
NOT_IN_THE_ORACLE = {
    "expected_attention",
    "reconstruction",
    "learned",
}  # see test_originals.py, test_learned.py
SCORERS = [name for name in get_args(ScorerName) if name not in {"attention", *NOT_IN_THE_ORACLE}]

cached_model = functools.lru_cache(maxsize=None)(tiny_model)


@st.composite
def models(draw: st.DrawFn) -> Transformer:
    layers = draw(st.integers(1, 3))
    heads, kv_heads = draw(st.sampled_from(GROUPINGS))
    window = draw(st.sampled_from([None, None, 4, 16, 40]))
    slides = [draw(st.booleans()) for _ in range(layers)]
    windows = None if window is None else tuple(window if slide else None for slide in slides)
    seed = draw(st.integers(0, 3))
    return cached_model(seed, layers=layers, heads=heads, kv_heads=kv_heads, windows=windows)


@st.composite
def rules(draw: st.DrawFn, layers: int) -> Rule:
    """Any rule that is one: options that others leave without effect keep their defaults."""

    def pick(*choices: object) -> object:
        return draw(st.sampled_from(choices))

    scorer = pick("attention", "attention", "attention", *SCORERS)
    scope = pick("shared", "shared", "layer", "head")
    options = {"scorer": scorer, "scope": scope}
    options |= _when_to_evict(pick, scorer != "none")
    if scorer in OF_ATTENTION and options.keys() <= {"scorer", "scope", "window"}:
        options["draft"] = pick(0, 0, 1, 3, 12)
        options["drafts"] = pick(1, 1, 2, 3) if options["draft"] else 1
    if scorer == "attention" and (options.get("window") or options.get("draft")):
        options["window_by"] = pick("mean", "max")
    if scorer != "none":
        options |= _scoring(pick, layers, shared=scope == "shared", again=options.get("after") is None)
    if not options.get("protect_prompt"):
        choices = {"shared": [], "layer": ["pyramid"], "head": ["pyramid", "adaptive", "adaptive"]}[
            str(scope)
        ]
        allocation = pick("uniform", *choices)
        options["allocation"] = "uniform" if allocation == "adaptive" and scorer == "none" else allocation
        options["rescue"] = pick(0, 0, 2, 5) if scorer != "none" else 0
        options |= {"sinks": pick(0, 0, 1, 3), "reserve": pick(0.0, 0.0, 0.2, 0.7)}
    options["recent"] = pick(0, 0, 1, 3, 0.25)
    if pick(True, False):
        # More than what is protected by number alone, of which shares take a part as well.
        least = sum(int(n) for n in (options.get("sinks", 0), options["recent"], options.get("rescue", 0)))
        options["budget"] = max(1, least) + draw(st.integers(0, 40))
    else:
        options["compression"] = pick(0.0, 0.4, 0.5, 0.8, 0.9)
    return Rule(**options)


def _when_to_evict(pick: object, scores: bool) -> dict[str, object]:
    if pick(*[False] * 7, True):
        return {"protect_prompt": True}
    options = {"window": pick(0, 0, 0, 1, 4, 20) if scores else 0}
    if pick(True, False, False):
        options |= {"evict_at": "prompt", "window": pick(1, 4, 20) if scores else 0}
        if (after := pick("rule", "recency", "none")) != "rule":
            options["after"] = after
    return options


def _scoring(pick: object, layers: int, *, shared: bool, again: bool) -> dict[str, object]:
    """`again`: the rule scores while decoding."""
    options = {"aggregation": pick("ema", "ema", "cumulative", "single")}
    if options["aggregation"] == "ema":
        options["step_alpha"] = pick(None, None, 0.0, 0.5, 0.9)
        if shared:
            options["coupling"] = pick("layer_temporal", "temporal", "layer")
        if options["step_alpha"] is None or options.get("coupling", "temporal") != "temporal":
            options["alpha"] = pick(0.0, 0.3, 0.8, 0.95)
    if shared:
        options["layers"] = pick(None, None, (layers - 1,), tuple({0, layers - 1}))
    if pick(False, True):
        options |= {"pool": pick(3, 5, 9), "pool_by": pick("max", "mean")}
        if again:
            options["pool_at"] = pick("prompt", "always")
    if again:
        options |= {"refresh": pick(1, 1, 2, 3, 7, "once"), "new_token": pick("zero", "zero", "mean")}
    return options


@st.composite
def cases(draw: st.DrawFn) -> tuple[Transformer, Rule]:
    model = draw(models())
    return model, draw(rules(model.config.num_layers))


def oracle_for(model: Transformer, rule: Rule | None) -> Oracle:
    return Oracle(model, rule, draws(rule, model) if rule is not None and rule.scorer == "random" else None)


def draws(rule: Rule, model: Transformer) -> Draw:
    """The implementation's own random numbers."""
    return functools.partial(random_scores, EvictionConfig(**rule.options()), model.config.num_layers)


def arbiter_of(decoder: Decoder, oracle: Oracle, row: int = 0) -> Arbiter:
    """What the decoder keeps of each set."""
    assert decoder.cache is not None
    kept = {key_of(oracle, s.layers, s.heads): set(s.kept) for s in set_states(decoder.cache, row)}
    return kept.__getitem__


def key_of(oracle: Oracle, layers: list[int], heads: list[int]) -> Key:
    return () if oracle.rule is None else oracle.rule.key(layers[0], heads[0])


def assert_agrees(decoder: Decoder, oracle: Oracle, row: int = 0) -> None:
    """The same cache as the oracle's: of every set, kept positions, utilities, and K and V."""
    assert decoder.cache is not None
    states = set_states(decoder.cache, row)
    assert len(states) == len(oracle.utility)
    for state in states:
        key = key_of(oracle, state.layers, state.heads)
        assert state.kept == oracle.kept(key)
        wanted_N = torch.tensor([oracle.utility[key][p] for p in state.kept], dtype=torch.float64)
        torch.testing.assert_close(state.utility_N, wanted_N, rtol=TOLERANCE, atol=1e-12)
        for mine_LGND, theirs in ((state.k_LGND, oracle.k), (state.v_LGND, oracle.v)):
            wanted = [[[theirs[i, g][p] for p in state.kept] for g in state.heads] for i in state.layers]
            torch.testing.assert_close(
                mine_LGND, torch.from_numpy(np.array(wanted)).view_as(mine_LGND), rtol=0, atol=TOLERANCE
            )


def follow(decoder: Decoder, oracles: list[Oracle], answers: list[list[int]], steps: int) -> None:
    """Compare answers that begin with these tokens, one decode step at a time. Where rounding alone decides
    what is evicted, the decoder's word holds."""
    assert decoder.decode(1).tokens == answers
    for number in range(steps):
        refreshes = decoder.stats.refreshes
        tokens = decoder.decode(1).tokens
        for row, (oracle, answer) in enumerate(zip(oracles, answers, strict=True)):
            step = oracle.decode(answer[-1], arbiter_of(decoder, oracle, row))
            assume(not step.unclear)
            assert tokens[row] == [step.token]
            assert_agrees(decoder, oracle, row)
            if number:
                assert decoder.stats.refreshes - refreshes == step.refreshed
        for answer, of_row in zip(answers, tokens, strict=True):
            answer[:] = of_row


@given(case=cases(), length=st.integers(8, 70), seed=st.integers(0, 1000))
def test_every_rule_follows_the_method_step_by_step(
    case: tuple[Transformer, Rule], length: int, seed: int
) -> None:
    model, rule = case
    prompt = random_prompt(length, seed)
    if not rule.fits(length):
        with pytest.raises(ValueError, match="protect more"):
            decoder_for(model, EvictionConfig(**rule.options())).prefill(prompt)
        event("budget too small")
        return
    oracle, decoder = oracle_for(model, rule), decoder_for(model, EvictionConfig(**rule.options()))
    decoder.prefill(prompt, max_new_tokens=STEPS + 1)
    first = oracle.prefill(prompt, arbiter_of(decoder, oracle))
    if oracle.evicts_prompt:
        assert_agrees(decoder, oracle)
        assert decoder.stats.refreshes == (rule.scorer != "none")
    follow(decoder, [oracle], [[first]], STEPS)
    assert decoder.stats.sequence_tokens == [length + STEPS]
    assert decoder.stats.kept_tokens == [
        pytest.approx(sum(map(len, oracle.utility.values())) / len(oracle.utility))
    ]


@given(
    case=cases(),
    lengths=st.lists(st.integers(8, 60), min_size=1, max_size=3),
    chunk=st.sampled_from([1, 7, 16, 2048]),
    turns=st.lists(st.integers(1, 40), max_size=2),
)
def test_every_row_and_further_turn_of_a_ragged_batch_follows_the_method(
    case: tuple[Transformer, Rule], lengths: list[int], chunk: int, turns: list[int]
) -> None:
    model, rule = case
    if not all(map(rule.fits, lengths)):
        return
    prompts = random_prompts(lengths)
    decoder = decoder_for(model, EvictionConfig(**rule.options()), prefill_chunk=chunk)
    decoder.prefill(prompts)
    oracles = [oracle_for(model, rule) for _ in prompts]
    answers = [
        [oracle.prefill(prompt, arbiter_of(decoder, oracle, row))]
        for row, (oracle, prompt) in enumerate(zip(oracles, prompts, strict=True))
    ]
    follow(decoder, oracles, answers, 8)
    for number, length in enumerate(turns):
        rows = [random_prompt(max(1, length - 9 * row), 50 + number + row) for row in range(len(prompts))]
        decoder.extend(rows)
        for row, (oracle, answer, turn) in enumerate(zip(oracles, answers, rows, strict=True)):
            step = oracle.extend([*answer, *turn], arbiter_of(decoder, oracle, row))
            assume(not step.unclear)
            assert_agrees(decoder, oracle, row)
            answer[:] = [step.token]
        follow(decoder, oracles, answers, 4)


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


@pytest.mark.parametrize("seed, refresh", [(0, 1), (1, 4), (2, 4)])
def test_float32_chooses_the_tokens_of_the_method(seed: int, refresh: int) -> None:
    prompt, rule = random_prompt(64, seed), Rule(compression=0.75, refresh=refresh)
    oracle = Oracle(tiny_model(seed, layers=3), rule)
    answer = [oracle.prefill(prompt)]
    for _ in range(40):
        answer.append(oracle.decode(answer[-1]).token)
    decoder = decoder_for(tiny_model(seed, layers=3, dtype=torch.float32), EvictionConfig(**rule.options()))
    assert decoder.generate(prompt, 41).tokens == [answer]
    assert conversation_state(decoder).kept == oracle.kept()


class Talk:
    """One row's conversation, of which each token of an answer is fed when the next one is asked for."""

    def __init__(self, model: Transformer, rule: Rule | None, prompt: list[int]) -> None:
        self.oracle = oracle_for(model, rule)
        self.next: int | None = self.oracle.prefill(prompt)
        self.last = self.next
        self.ended, self.unclear = False, self.oracle.unclear

    def decode(self, count: int, eos: list[int]) -> list[int]:
        answer: list[int] = []
        while len(answer) < count and not self.ended:
            if self.next is None:
                self._feed()
            assert self.next is not None
            self.last, self.next = self.next, None
            answer.append(self.last)
            self.ended = self.last in eos
        oracle = self.oracle
        first = oracle.rule is not None and oracle.step == 0 and not oracle.evicts_prompt
        if first and (oracle.overfull or not self.ended):
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


@given(
    case=cases(),
    full=st.sampled_from([False] * 7 + [True]),
    lengths=st.lists(st.integers(8, 60), min_size=1, max_size=3),
    eos=st.lists(st.integers(0, 60), max_size=5),
    script=st.lists(actions, min_size=1, max_size=6),
)
def test_conversations_follow_the_method(
    case: tuple[Transformer, Rule],
    full: bool,
    lengths: list[int],
    eos: list[int],
    script: list[tuple[str, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model, drawn = case
    rule = None if full else drawn
    if rule is not None and not all(map(rule.fits, lengths)):
        return
    config = None if rule is None else EvictionConfig(**rule.options())
    prompts = random_prompts(lengths)
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
