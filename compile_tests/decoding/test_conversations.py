"""Further turns, stops, saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from compile_tests.tiny import (
    Spy,
    assert_same_state,
    conversation_state,
    decoder_for,
    random_prompt,
    spoil_unused_slots,
    tiny_model,
)
from inertiakv import Decoder, EvictionConfig, Sampling, StopStrings, policy

MODEL = tiny_model(11)
LAZY = EvictionConfig(compression=0.7, refresh=3, sinks=1, recent=2)
DRAFT = EvictionConfig(budget=15, draft=7, window_by="max", refresh=2)
RULES = [None, LAZY, EvictionConfig(budget=15), EvictionConfig(budget=400, refresh="once"), DRAFT]
TOLERANCE = 1e-11


def turn(length: int, seed: int) -> list[int]:
    return random_prompt(length, 100 + seed)


# Further turns
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, answer, further",
    [(1, 0, 1), (1, 9, 130), (40, 0, 2), (40, 1, 30), (40, 9, 1), (127, 0, 130), (127, 1, 1), (127, 9, 30)],
)
def test_turns_over_the_full_cache_are_one_long_prompt(prompt: int, answer: int, further: int) -> None:
    decoder, whole = decoder_for(MODEL, None, prefill_chunk=50), decoder_for(MODEL, None)
    history = random_prompt(prompt)
    decoder.prefill(history)
    for seed in range(2):
        if answer:
            history = history + decoder.decode(answer).tokens[0]
        decoder.extend(turn(further, seed))
        history = history + turn(further, seed)
    expected = whole.generate(history, 12)
    assert decoder.decode(12).tokens == expected.tokens
    assert_same_state(conversation_state(decoder), conversation_state(whole), TOLERANCE)


ROWS = [
    ([5, 50, 20], [40, 3, 1], 4),
    ([5, 50, 20], [40, 3, 1], 0),
    ([100, 3], [280, 290], 1),
    ([300, 2], [1, 600], 0),
    ([2, 300], [300, 2], 1),
]
"""Tokens of prompts, of further turns, and of answers between them."""


@pytest.mark.parametrize(
    "prompts, turns, answer, eviction",
    [(*rows, RULES[(i + j) % 5]) for i, rows in enumerate(ROWS) for j in (0, 2)],
    ids=str,
)
def test_a_rows_turn_is_what_it_would_be_alone(
    prompts: list[int], turns: list[int], answer: int, eviction: EvictionConfig | None
) -> None:
    def converse(rows: list[int]) -> tuple[Decoder, list[list[int]]]:
        decoder = decoder_for(MODEL, eviction)
        decoder.prefill([random_prompt(prompts[row], row) for row in rows])
        if answer:
            decoder.decode(answer)
        for seed in range(2):
            decoder.extend([turn(turns[row], row + 10 * seed) for row in rows])
            tokens = decoder.decode(6).tokens
        return decoder, tokens

    if eviction is LAZY:
        prompts = [max(10, length) for length in prompts]
    decoder, tokens = converse(list(range(len(prompts))))
    for row in range(len(prompts)):
        single, expected = converse([row])
        assert tokens[row] == expected[0]
        assert_same_state(conversation_state(decoder, row), conversation_state(single), TOLERANCE)


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 4, "once"]))
def test_a_turn_ends_within_budget_and_positions_go_on(
    prompt: int, further: int, budget: int, refresh: int | str
) -> None:
    spy = Spy(MODEL)
    decoder = decoder_for(spy, EvictionConfig(budget=budget, refresh=refresh))
    decoder.generate(random_prompt(prompt), 3)
    length = prompt + 3
    for seed in range(2):
        spy.positions.clear()
        decoder.extend(turn(further, seed))
        assert [p for chunk in spy.positions for p in chunk[0]][-further:] == list(
            range(length, length + further)
        )
        assert decoder.cache is not None
        assert int(decoder.cache.most_B) == min(budget, length + further)
        stats = decoder.decode(3).stats
        length += further + 3
        assert stats.kept_tokens == [min(budget, length - 1)]
        assert stats.sequence_tokens == [length - 1]


def test_the_schedule_begins_anew_with_every_turn() -> None:
    decoder = decoder_for(MODEL, EvictionConfig(budget=15, refresh=4))
    assert decoder.generate(random_prompt(40), 8).stats.refreshes == 2  # steps 1 and 5 of 7
    decoder.extend(turn(9, 1))
    assert decoder.stats.refreshes == 3
    assert decoder.decode(5).stats.refreshes == 4  # step 1 was the turn's last token, then 2 to 5
    once = decoder_for(MODEL, EvictionConfig(budget=15, refresh="once"))
    once.generate(random_prompt(40), 8)
    once.extend(turn(9, 1))
    assert once.decode(9).stats.refreshes == 2


@pytest.mark.parametrize("eviction", RULES)
@pytest.mark.parametrize("after", [0, 1])
def test_the_end_of_an_answer_enters_the_next_turn_once(eviction: EvictionConfig | None, after: int) -> None:
    prompts = [random_prompt(40), random_prompt(30, 5)]
    decoder = decoder_for(MODEL, eviction)
    whole = decoder.generate(prompts, 12).tokens
    eos = next(token for i, token in enumerate(whole[0]) if i >= after and token not in whole[0][:i])
    ended = decoder.generate(prompts, 12, eos_token_ids=[eos])
    assert ended.finish_reasons[0] == "eos"
    decoder.extend([turn(9, 1), turn(4, 2)])
    sequence = [len(p) + len(t) + n for p, t, n in zip(prompts, ended.tokens, (9, 4), strict=True)]
    out = decoder.decode(5)
    assert out.finish_reasons == ["length", "length"]
    assert out.stats.sequence_tokens == [n + 4 for n in sequence]
    for row in range(2):
        single = decoder_for(MODEL, eviction)
        single.generate(prompts[row], 12, eos_token_ids=[eos])
        single.extend(turn((9, 4)[row], row + 1))
        assert single.decode(5).tokens[0] == out.tokens[row]


@pytest.mark.parametrize("eviction", RULES)
def test_unused_slots_never_matter_to_a_further_turn(eviction: EvictionConfig | None) -> None:
    answers = []
    for spoil in (False, True):
        decoder = decoder_for(MODEL, eviction)
        decoder.generate([random_prompt(100), random_prompt(11, 1)], 5)
        if spoil:
            spoil_unused_slots(decoder)
        decoder.extend([turn(5, 1), turn(6, 2)])
        answers.append(decoder.decode(9).tokens)
    assert answers[0] == answers[1]


def test_what_a_turn_cannot_be() -> None:
    decoder = decoder_for(tiny_model(11, max_positions=64), EvictionConfig(budget=15))
    with pytest.raises(ValueError, match="no conversation yet"):
        decoder.extend([1])
    expected = decoder.generate([random_prompt(40), random_prompt(9)], 10).tokens
    decoder.generate([random_prompt(40), random_prompt(9)], 4)
    for turns, match in (
        ([1, 2], "1 turns for a conversation of 2 rows"),
        ([[1], []], "turn 1 has no tokens"),
        ([[1], [61]], "turn 1 has 61"),
        ([[1] * 30, [1]], "positions"),
    ):
        with pytest.raises(ValueError, match=match):
            decoder.extend(turns)
    with pytest.raises(ValueError, match="positions"):
        decoder.extend([[1], [1]], max_new_tokens=30)
    assert decoder.decode(6).tokens == [row[4:] for row in expected]


# Stops
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", RULES)
@pytest.mark.parametrize("after", [1, 7])
def test_a_stop_ends_its_row_alone(eviction: EvictionConfig | None, after: int) -> None:
    prompts = [random_prompt(40), random_prompt(12, 1), random_prompt(90, 2)]
    decoder = decoder_for(MODEL, eviction)
    whole = decoder.generate(prompts, 20).tokens
    states = [conversation_state(decoder, row) for row in (0, 2)]
    out = decoder.generate(prompts, 20, stop=lambda row, tokens: row == 1 and len(tokens) == after)
    assert out.tokens == [whole[0], whole[1][:after], whole[2]]
    assert out.finish_reasons == ["length", "stop", "length"]
    for state, row in zip(states, (0, 2), strict=True):
        assert_same_state(conversation_state(decoder, row), state, TOLERANCE)


def test_a_stop_sees_the_answer_as_it_grows() -> None:
    seen: list[list[int]] = []
    decoder = decoder_for(MODEL, LAZY)
    out = decoder.generate(random_prompt(40), 5, stop=lambda row, tokens: seen.append(list(tokens)) or False)
    assert seen == [out.tokens[0][: i + 1] for i in range(5)]


@pytest.mark.parametrize("move_on", ["generate", "extend", "decode"])
def test_a_stream_ends_where_its_conversation_goes_on_without_it(move_on: str) -> None:
    decoder, fresh = decoder_for(MODEL, LAZY), decoder_for(MODEL, LAZY)
    left, closed = decoder.stream(random_prompt(40), 20), decoder.stream(random_prompt(40), 20)
    for stream in (left, closed):
        next(stream)
    next(closed)
    fresh.prefill(random_prompt(40))
    fresh.decode(2)
    for one in (decoder, fresh):
        if move_on == "generate":
            one.prefill(random_prompt(60, 1))
        elif move_on == "extend":
            one.extend(turn(5, 1))
        else:
            one.decode(24)
    with pytest.raises(ValueError, match="gone on without it"):
        next(left)
    closed.close()
    assert decoder.decode(9).tokens == fresh.decode(9).tokens
    assert_same_state(conversation_state(decoder), conversation_state(fresh))


class Letters:
    """A tokenizer with one letter a token."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)


def test_stop_strings_end_a_row_at_their_last_token() -> None:
    decoder = decoder_for(MODEL, LAZY)
    tokens = decoder.generate(random_prompt(40), 20).tokens[0]
    text = Letters().decode(tokens)
    wanted = text[6:9]
    stop = StopStrings(Letters(), ["no such text", wanted])
    out = decoder.generate(random_prompt(40), 20, stop=stop)
    assert Letters().decode(out.tokens[0]) == text[: text.index(wanted) + 3]
    assert out.finish_reasons == ["stop"]
    assert stop.cut(text) == text[: text.index(wanted)]
    assert StopStrings(None, "abc").strings == ["abc"]
    with pytest.raises(ValueError, match="non-empty"):
        StopStrings(Letters(), [""])
    for strings in (None, 3, [b"abc"], []):
        with pytest.raises(ValueError, match="stop strings must be non-empty"):
            StopStrings(Letters(), strings)  # type: ignore[arg-type]


# Saving and loading
# ------------------------------------------------------------------------------------------------------------


TWO = [random_prompt(60), random_prompt(20, 1)]


def at_turn(decoder: Decoder) -> None:
    decoder.generate(TWO, 10)
    decoder.extend([turn(30, 1), turn(4, 2)])


POINTS: dict[str, Callable[[Decoder], object]] = {
    "prompt": lambda d: d.prefill(TWO),
    "first token": lambda d: d.generate(TWO, 1),
    "answer": lambda d: d.generate(TWO, 10),
    "ended row": lambda d: d.generate(TWO, 10, stop=lambda row, tokens: row == 0 and len(tokens) > 3),
    "turn": at_turn,
}


GREEDY, DRAWN = Sampling(), Sampling(temperature=0.9, seed=[4, 5])


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("eviction, sampling", [(None, DRAWN), (LAZY, DRAWN), (DRAFT, GREEDY)])
def test_going_on_from_a_file_is_going_on(
    point: str, eviction: EvictionConfig | None, sampling: Sampling, tmp_path: Path
) -> None:
    def go_on(decoder: Decoder) -> tuple[object, ...]:
        first = decoder.decode(12, sampling=sampling)
        decoder.extend([turn(5, 3), turn(9, 4)])
        second = decoder.decode(3, sampling=sampling)
        stats = second.stats
        counts = (stats.refreshes, stats.evictions, stats.kept_tokens, stats.sequence_tokens, stats.budgets)
        return first.tokens, first.finish_reasons, second.tokens, counts

    decoder = decoder_for(MODEL, eviction)
    POINTS[point](decoder)
    decoder.save(tmp_path / "conversation")
    states = [conversation_state(decoder, row) for row in range(2)]
    expected = go_on(decoder)
    for other in (decoder_for(MODEL, eviction), decoder):
        if other is not decoder:
            other.generate(random_prompt(33), 3)
        other.load(tmp_path / "conversation")
        for row in range(2):
            assert_same_state(conversation_state(other, row), states[row])
        assert go_on(other) == expected
    for row in range(2):
        assert_same_state(conversation_state(other, row), conversation_state(decoder, row))


@pytest.mark.parametrize(
    "other",
    [
        lambda: decoder_for(tiny_model(11, layers=3), LAZY),
        lambda: decoder_for(tiny_model(11, kv_heads=4), LAZY),
        lambda: decoder_for(tiny_model(11, dtype=torch.float32), LAZY),
        lambda: decoder_for(tiny_model(11, windows=(8, None)), LAZY),
        lambda: decoder_for(tiny_model(12), LAZY),
        lambda: decoder_for(MODEL, None),
        lambda: decoder_for(MODEL, EvictionConfig(compression=0.7, refresh=3, sinks=1, recent=3)),
    ],
    ids=["layers", "kv heads", "dtype", "windows", "weights", "full cache", "rule"],
)
def test_a_file_of_another_model_or_rule_is_refused(other: object, tmp_path: Path) -> None:
    decoder = decoder_for(MODEL, LAZY)
    decoder.generate(TWO, 10)
    decoder.save(tmp_path / "conversation")
    stranger = other()
    expected = stranger.generate(random_prompt(30), 12).tokens[0]
    start = stranger.generate(random_prompt(30), 6).tokens[0]
    with pytest.raises(ValueError, match="was saved with"):
        stranger.load(tmp_path / "conversation")
    assert start + stranger.decode(6).tokens[0] == expected


def test_a_conversation_that_cannot_be_written(tmp_path: Path) -> None:
    decoder = decoder_for(MODEL, None)
    decoder.generate(random_prompt(10), 2)
    for path in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(OSError, match="the conversation was not saved"):
            decoder.save(path)


def test_files_that_are_no_conversation(tmp_path: Path) -> None:
    decoder = decoder_for(MODEL, LAZY)
    with pytest.raises(ValueError, match="no conversation yet"):
        decoder.save(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="missing"):
        decoder.load(tmp_path / "missing")
    save_file({"k": torch.zeros(3)}, tmp_path / "weights")
    with pytest.raises(ValueError, match="no saved conversation"):
        decoder.load(tmp_path / "weights")
    decoder.generate(TWO, 10)
    decoder.save(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    (tmp_path / "truncated").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="no readable"):
        decoder.load(tmp_path / "truncated")
    assert decoder.decode(2).tokens


@pytest.mark.parametrize("name", ["cache.layers.0.k_BGND", "rows.token_B"])
@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_a_damaged_file_is_refused_and_the_conversation_stays(tmp_path: Path, name: str, damage: str) -> None:
    decoder, path = decoder_for(MODEL, LAZY), tmp_path / "saved.safetensors"
    expected = decoder.generate(TWO, 15).tokens
    start = decoder.generate(TWO, 10).tokens
    decoder.save(path)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:0] if damage == "shape" else tensors[name].to(torch.float16)
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        decoder.load(path)
    rest = decoder.decode(5).tokens
    assert [a + b for a, b in zip(start, rest, strict=True)] == expected


@pytest.mark.parametrize("name", ["full", "inertiakv", "tova", "h2o", "snapkv", "adakv"])
def test_a_prompt_read_once_serves_every_rule(name: str) -> None:
    request = [random_prompt(90, 1), random_prompt(41, 2)]
    reader = decoder_for(MODEL, None)
    reader.prefill(request)
    rule = None if name == "full" else policy(name, budget=40)
    own, taken = decoder_for(MODEL, rule), decoder_for(MODEL, rule)
    expected = own.generate(request, 20)
    for _ in range(2):  # and again, since nothing of it was used up
        taken.take_prompt(reader, max_new_tokens=20)
        out = taken.decode(20)
        assert out.tokens == expected.tokens
        assert out.stats.kept_tokens == expected.stats.kept_tokens
        assert out.stats.cache_bytes == expected.stats.cache_bytes
    assert reader.decode(20).tokens == decoder_for(MODEL, None).generate(request, 20).tokens


def test_a_prompt_that_was_evicted_or_answered_cannot_be_taken_over() -> None:
    reader, taker = decoder_for(MODEL, EvictionConfig(budget=10)), decoder_for(MODEL, None)
    with pytest.raises(ValueError, match="no conversation yet"):
        taker.take_prompt(reader)
    reader.generate(random_prompt(30), 2)
    with pytest.raises(ValueError, match="of which nothing was evicted or answered"):
        taker.take_prompt(reader)
    reader.prefill(random_prompt(30))
    with pytest.raises(ValueError, match="cannot take a prompt over from itself"):
        reader.take_prompt(reader)
    with pytest.raises(ValueError, match="another model"):
        decoder_for(tiny_model(5), None).take_prompt(reader)
