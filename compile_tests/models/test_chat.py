"""Chats: each turn is read behind what the cache has kept, as if all had been read together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile_tests.tiny_chat import set_eos, tiny_chat
from inertiakv import Decoder, EvictionConfig, Sampling
from inertiakv.models import Chat, load_model
from inertiakv.models.encoding import chat_text, encode_text

TURNS = ["Hello there", "What is it?", "And why?"]


@pytest.fixture(scope="module", params=["llama", "qwen"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tiny_chat(tmp_path_factory.mktemp("chat"), request.param, max_positions=400)
    return load_model(folder, dtype="float32")


def chat(loaded: tuple[Any, Any], rule: EvictionConfig | None = None, **options: Any) -> Chat:
    return Chat(*loaded, rule, compile=False, **options)


def test_with_the_full_cache_turns_are_answered_as_if_read_together(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    talk, whole = chat(loaded, system="Be brief."), Decoder(model, None, compile=False)
    read: list[int] = []
    for turn in TURNS:
        messages = [*talk.messages, {"role": "user", "content": turn}]
        added = talk._turn(messages)
        read += encode_text(tokenizer, chat_text(tokenizer, messages)) if added is None else added
        talk.say(turn, 12)
        assert talk._answer == whole.generate(read, 12).tokens[0]
        read += talk._answer
    assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 3]


def test_what_is_read_is_what_the_template_writes(loaded: tuple[Any, Any]) -> None:
    """Answers of random bytes are not what their text would be read as, so the lengths tell."""
    _, tokenizer = loaded
    talk = chat(loaded)
    for turn in TURNS:
        talk.say(turn, 5)
    read = talk.decoder.batch.position_B[0] + 1 - 3 * 5
    whole = encode_text(tokenizer, chat_text(tokenizer, talk.messages[:-1]))
    answers = sum(len(tokenizer(m["content"]).input_ids) for m in talk.messages[1:-1:2])
    assert abs(int(read) - (len(whole) - answers)) <= 2  # a BOS for each answer


def test_an_answer_that_its_end_token_ends_has_one_end(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    kind = "llama" if loaded[1].bos_token else "qwen"
    folder = tiny_chat(tmp_path, kind)
    model, tokenizer = load_model(folder, dtype="float32")
    first = chat((model, tokenizer)).say(TURNS[0], 6)
    tokens = chat((model, tokenizer)).decoder.generate(
        encode_text(tokenizer, chat_text(tokenizer, [{"role": "user", "content": TURNS[0]}])), 6
    )
    assert first == tokenizer.decode(tokens.tokens[0], skip_special_tokens=True)
    set_eos(folder, tokenizer.eos_token_id)
    talk = chat(load_model(folder, dtype="float32"))
    list(talk.stream(TURNS[0], 1))
    talk._answer = [tokenizer.eos_token_id]
    messages = [*talk.messages, {"role": "user", "content": TURNS[1]}]
    turn = talk._turn(messages)
    talk._answer = [5]
    longer = talk._turn(messages)
    assert turn is not None
    assert longer == [tokenizer.eos_token_id, *turn]


def test_an_answer_that_is_left_early_is_what_came_of_it(loaded: tuple[Any, Any]) -> None:
    rule = EvictionConfig(budget=20)
    talk = chat(loaded, rule)
    pieces = talk.stream(TURNS[0], 40)
    first = next(pieces)
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": first}
    assert talk.decoder.stats.kept_tokens == [20]
    assert isinstance(talk.say(TURNS[1], 5), str)
    assert len(talk.messages) == 4


def test_after_an_error_the_chat_is_as_before_the_message(loaded: tuple[Any, Any]) -> None:
    talk, expected = chat(loaded), chat(loaded)
    for each in (talk, expected):
        each.say(TURNS[0], 8)
    before = list(talk.messages)

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.say(TURNS[1], 8, progress=fail)
    assert talk.messages == before
    expected.reread()
    assert talk.say(TURNS[1], 8) == expected.say(TURNS[1], 8)


def test_another_rule_reads_everything_anew(loaded: tuple[Any, Any]) -> None:
    talk, expected = chat(loaded), chat(loaded, EvictionConfig(budget=10))
    expected.messages = [{"role": "user", "content": TURNS[0]}]
    expected.messages.append({"role": "assistant", "content": talk.say(TURNS[0], 8)})
    talk.use(EvictionConfig(budget=10))
    assert talk.say(TURNS[1], 8) == expected.say(TURNS[1], 8)
    assert talk.decoder.stats.kept_tokens == [10]


def test_a_chat_without_room_says_so(loaded: tuple[Any, Any]) -> None:
    talk = chat(loaded)
    talk.say("x" * 200, 300)  # as many as fit
    assert talk.decoder.stats.sequence_tokens[0] <= 400
    before = list(talk.messages)
    with pytest.raises(ValueError, match="and the model has 400 positions: clear it"):
        talk.say("y" * 100)
    assert talk.messages == before
    talk.clear()
    assert talk.messages == []
    talk.say(TURNS[0], 4, sampling=Sampling(temperature=0.9, seed=3))


@pytest.mark.parametrize(
    "text,options,match",
    [
        ("Hi", {"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
        ("Hi", {"max_new_tokens": 1.5}, "max_new_tokens must be a whole number"),
        ("Hi", {"sampling": Sampling(temperature=1.0, seed=[1, 2])}, "2 seeds for 1 prompts"),
        (3, {}, "a message is a text, got 3"),
        ("\ud800", {}, "the message is not UTF-8 text"),
    ],
    ids=str,
)
def test_a_message_that_cannot_be_leaves_the_chat(
    loaded: tuple[Any, Any], text: Any, options: dict[str, Any], match: str
) -> None:
    talk, expected = chat(loaded), chat(loaded)
    for each in (talk, expected):
        each.say(TURNS[0], 8)
    before = list(talk.messages)
    with pytest.raises(ValueError, match=match):
        talk.say(text, **options)
    assert talk.messages == before
    assert talk.say(TURNS[1], 8) == expected.say(TURNS[1], 8)


def test_an_answer_that_another_message_cuts_off_is_no_part_of_the_chat(loaded: tuple[Any, Any]) -> None:
    talk, expected = chat(loaded), chat(loaded)
    pieces = talk.stream(TURNS[0], 40)
    next(pieces)
    assert talk.say(TURNS[1], 8) == expected.say(TURNS[1], 8)
    with pytest.raises(ValueError, match="gone on without it"):
        next(pieces)
    assert talk.messages == expected.messages
    assert talk.say(TURNS[2], 8) == expected.say(TURNS[2], 8)
