"""Rows of a batch, of different lengths and ends: each is what it would be alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from compile_tests.tiny import assert_same_state, conversation_state, decoder_for, random_prompt, tiny_model
from inertiakv import Decoder, EvictionConfig, Generation

MODEL = tiny_model(7)
PROMPTS = [random_prompt(length, length) for length in (5, 50, 130, 7)]
RULES = {
    "full": None,
    "ratio": EvictionConfig(compression=0.8),
    "ratio lazy": EvictionConfig(compression=0.8, refresh=4),
    "once": EvictionConfig(compression=0.6, refresh="once"),
    "budget": EvictionConfig(budget=20, sinks=2, recent=3),
    "large budget": EvictionConfig(budget=60, aggregation="cumulative", refresh=2),
    "temporal": EvictionConfig(budget=9, coupling="temporal"),
    "draft": EvictionConfig(budget=12, refresh=3, draft=9, drafts=2, window=3, window_by="max", pool=3),
}
TOLERANCE = 1e-11


def alone(
    eviction: EvictionConfig | None, prompt: list[int], steps: int, **options: object
) -> tuple[Decoder, Generation]:
    decoder = decoder_for(MODEL, eviction)
    return decoder, decoder.generate(prompt, steps, **options)


@pytest.mark.parametrize("rule, order", [*((rule, (0, 1, 2, 3)) for rule in RULES), ("ratio", (3, 3, 1))])
def test_a_row_is_what_it_would_be_alone(rule: str, order: Sequence[int]) -> None:
    prompts = [PROMPTS[index] for index in order]
    decoder = decoder_for(MODEL, RULES[rule])
    out = decoder.generate(prompts, 20)
    for row, prompt in enumerate(prompts):
        single, expected = alone(RULES[rule], prompt, 20)
        assert out.tokens[row] == expected.tokens[0]
        assert_same_state(conversation_state(decoder, row), conversation_state(single), TOLERANCE)
        for name in ("prompt_tokens", "budgets", "sequence_tokens", "kept_tokens", "evictions"):
            assert getattr(out.stats, name)[row] == getattr(expected.stats, name)[0]


def test_a_prompt_of_padding_alone_leaves_no_nan_anywhere() -> None:
    decoder = decoder_for(MODEL, EvictionConfig(budget=100), prefill_chunk=16)
    decoder.generate([random_prompt(1), random_prompt(90)], 5)
    cache = decoder.cache
    assert cache is not None
    for table in cache.buffers():
        assert not table.isnan().any()


def first_chosen_after(tokens: list[int], steps: int) -> int:
    """An id that the answer chooses for the first time after `steps` tokens."""
    return next(token for i, token in enumerate(tokens) if i >= steps and token not in tokens[:i])


ENDS = [(0, 1), (1, 8), (2, 0), (3, 3)]
"""Of these rows the answer ends after so many steps."""


@pytest.mark.parametrize("rule, end", [(rule, ENDS[i % 4]) for i, rule in enumerate(RULES)], ids=str)
def test_a_row_that_ends_early_changes_no_neighbour_and_nothing_of_itself(
    rule: str, end: tuple[int, int]
) -> None:
    whole = decoder_for(MODEL, RULES[rule]).generate(PROMPTS, 30).tokens
    eos = first_chosen_after(whole[end[0]], end[1])
    decoder = decoder_for(MODEL, RULES[rule])
    out = decoder.generate(PROMPTS, 30, eos_token_ids=[eos])
    for row, prompt in enumerate(PROMPTS):
        size = whole[row].index(eos) + 1 if eos in whole[row] else 30
        assert out.tokens[row] == whole[row][:size]
        assert out.finish_reasons[row] == ("eos" if size < 30 or whole[row][-1] == eos else "length")
        single, expected = alone(RULES[rule], prompt, 30, eos_token_ids=[eos])
        assert expected.tokens[0] == out.tokens[row]
        assert expected.finish_reasons[0] == out.finish_reasons[row]
        if size > 1:
            assert_same_state(conversation_state(decoder, row), conversation_state(single), TOLERANCE)
    again = decoder.decode(5, eos_token_ids=[eos]).tokens
    for row, tokens in enumerate(again):
        assert bool(tokens) == (out.finish_reasons[row] == "length")


@pytest.mark.parametrize("budget", [20, 50])
def test_a_row_that_ends_at_its_first_token_keeps_what_it_would_keep_alone(budget: int) -> None:
    eviction, short = EvictionConfig(budget=budget), PROMPTS[0]
    eos = alone(eviction, short, 1)[1].tokens[0][0]
    single, expected = alone(eviction, short, 9, eos_token_ids=[eos])
    decoder = decoder_for(MODEL, eviction)
    out = decoder.generate([short, PROMPTS[2]], 9, eos_token_ids=[eos])
    assert out.tokens[0] == expected.tokens[0] == [eos]
    assert conversation_state(decoder, 0).kept == conversation_state(single).kept
    assert out.stats.sequence_tokens[0] == expected.stats.sequence_tokens[0]


@pytest.mark.parametrize("rule", ["ratio lazy", "full"])
@pytest.mark.parametrize("ends_after", [0, 5, None])
def test_reading_tokens_many_steps_at_a_time_changes_nothing(
    rule: str, ends_after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where the rows' ends are noticed late."""
    prompt = PROMPTS[1]
    whole = alone(RULES[rule], prompt, 40)[1].tokens[0]
    eos = [] if ends_after is None else [first_chosen_after(whole, ends_after)]
    single, expected = alone(RULES[rule], prompt, 40, eos_token_ids=eos)
    decoder = decoder_for(MODEL, RULES[rule])
    monkeypatch.setattr(decoder, "_read_every", lambda stop: 32)
    out = decoder.generate(prompt, 40, eos_token_ids=eos)
    assert out.tokens == expected.tokens
    assert_same_state(conversation_state(decoder), conversation_state(single))
    for name in ("decode_steps", "refreshes", "evictions", "sequence_tokens", "kept_tokens"):
        assert getattr(out.stats, name) == getattr(expected.stats, name)


def test_several_ends_are_known() -> None:
    whole = alone(None, PROMPTS[1], 30)[1].tokens[0]
    first, second = first_chosen_after(whole, 4), first_chosen_after(whole, 9)
    out = alone(None, PROMPTS[1], 30, eos_token_ids=[second, first])[1]
    assert out.tokens[0] == whole[: whole.index(first) + 1]


def test_the_models_own_end_is_used_unless_another_is_given() -> None:
    whole = alone(None, PROMPTS[1], 30)[1].tokens[0]
    eos = first_chosen_after(whole, 4)
    model = tiny_model(7)
    model.config = dataclasses.replace(model.config, eos_token_ids=(eos,))
    decoder = decoder_for(model, None)
    assert decoder.generate(PROMPTS[1], 30).tokens[0] == whole[: whole.index(eos) + 1]
    assert decoder.generate(PROMPTS[1], 30, eos_token_ids=[]).tokens[0] == whole


@pytest.mark.parametrize("rows", [2, 17])
def test_tokens_that_take_the_mean_in_turn_tie_exactly(rows: int) -> None:
    model, once = tiny_model(dtype=torch.float32), EvictionConfig(budget=20, refresh="once")
    prompt = random_prompt(7, seed=5)
    alone = decoder_for(model, once).generate(prompt, 60)
    batch = decoder_for(model, once).generate([prompt] * rows, 60)
    assert batch.tokens == alone.tokens * rows
