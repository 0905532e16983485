"""The needle grid: the needle is there once and whole, deeper for a greater depth; prompts have a length."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_tests.tiny_chat import tiny_tokenizer
from inertiakv.evals import needle
from inertiakv.evals.essays import Essays
from inertiakv.evals.needle import DEPTHS, MAX_NEW_TOKENS, NEEDLE, PROMPT, needle_place
from inertiakv.evals.task import Prompting

SENTENCES = [f"On day {day} the keeper saw {day % 7} ships — and wrote it down." for day in range(400)]
ESSAYS = Essays(name="log", text=" ".join(SENTENCES))

ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"


def grid(kind: str = "llama", essays: Any = ESSAYS, **options: Any) -> needle.NeedleGrid:
    return needle.NeedleGrid(Prompting(tiny_tokenizer(kind), "chat"), essays, **options)


@given(
    length=st.integers(500, 6000),
    depth=st.integers(0, 100),
    kind=st.sampled_from(["llama", "qwen"]),
)
def test_the_needle_is_whole_and_the_length_kept(length: int, depth: int, kind: str) -> None:
    sample = grid(kind, depths=[depth]).sample(length, 0)
    assert sample.prompt.count(f"\n{NEEDLE}\n") == sample.prompt.count("Dolores") == 1
    tokens = Prompting(tiny_tokenizer(kind), "chat").count(sample.prompt)
    assert length - 12 <= tokens + MAX_NEW_TOKENS <= length
    assert "\ufffd" not in sample.prompt


def test_depths_are_met_at_the_ends_of_sentences() -> None:
    task = grid()
    length = 8000
    assert task.count(length) == len(DEPTHS) == 11
    asked = [task.sample(length, index) for index in range(11)]
    assert [sample.facts["depth"] for sample in asked[:4]] == [0, 100, 50, 20], "the first few are spread"
    samples = sorted(asked, key=lambda sample: float(sample.facts["depth"]))
    places = [sample.prompt.index(NEEDLE) for sample in samples]
    assert places == sorted(set(places))
    for sample, depth in zip(samples, DEPTHS, strict=True):
        before, after = sample.prompt.split(f"\n{NEEDLE}\n")
        haystack = before.split("<book> ")[1] + after.split(" </book>")[0]
        assert ESSAYS.text.startswith(haystack)
        assert sample.facts["depth"] == depth
        assert depth - 100 * 70 / len(haystack) <= sample.facts["placed"] <= depth
        assert depth in (0, 100) or before.endswith("down.")
    assert samples[0].facts["placed"] == 0
    assert samples[0].prompt.startswith(f"This is a very long story book: <book> \n{NEEDLE}\nOn day 0 ")
    assert samples[10].prompt.endswith(
        f"\n{NEEDLE}\n </book>.\n Based on the content of the book, "
        "Question: The best thing to do in San Francisco is: \nAnswer:"
    )
    assert samples[3].facts["essays"] == "log"


def test_short_essays_begin_again() -> None:
    sample = grid(essays=Essays(name="short", text="One. Two.")).sample(2000, 5)
    assert sample.prompt.count("One. Two.") > 100


def test_the_needle_goes_behind_a_full_stop() -> None:
    text = "Aaa bbb. Ccc 1.5 ddd.\nEee fff"
    assert [needle_place(text, depth) for depth in (0, 25, 32, 60, 73, 79, 99, 100)] == [
        *(0, 0, 8, 8, 8, 21, 21, 29)
    ]


def test_full_stops_of_any_script() -> None:
    assert needle_place("你好。再见！谁？没有", 55) == 3
    assert needle_place("你好。再见！谁？没有", 75) == 6
    assert needle_place("What? No! Yes it is", 80) == 9


@pytest.mark.parametrize("text, off", [("word " * 400, 4), ("字" * 2000, 0), ("One. " + "word " * 2000, 4)])
def test_a_needle_without_a_full_stop_near_keeps_its_depth(text: str, off: int) -> None:
    for depth in range(20, 100, 10):
        at = len(text) * depth // 100
        place = needle_place(text, depth)
        assert at - off - 1 <= place <= at
        assert not off or text[place - 1] == "d"
    assert (needle_place(text, 0), needle_place(text, 100)) == (0, len(text))


def test_scores() -> None:
    task = grid()
    sample = task.sample(1000, 0)
    assert task.metric.startswith("rouge-l f (rouge ")
    assert task.score(f" {NEEDLE}\n", sample) == pytest.approx(1, abs=1e-6)
    # An answer that does not repeat the question has fewer of the needle's words ("a" is there twice).
    part = task.score(f"{ANSWER}.", sample)
    said, words = len(set(ANSWER.split())), len(set(NEEDLE.rstrip(".").split()))
    assert (said, words) == (11, 19)
    assert part == pytest.approx(2 * said / (said + words), abs=1e-6)
    assert task.score("", sample) == 0


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_a_prompt_without_any_letter_of_the_essays_is_too_short(kind: str) -> None:
    task = grid(kind, essays=Essays(name="wide", text="字。" * 50))
    bare = task._prompting.count(PROMPT.format(haystack=f"\n{NEEDLE}\n")) + MAX_NEW_TOKENS
    lengths, made = range(bare, bare + 12), []
    for length in lengths:
        with contextlib.suppress(ValueError):
            made.append(task.sample(length, 5))
    assert 0 < len(made) < len(lengths)
    assert "字" in made[0].prompt


def test_errors() -> None:
    with pytest.raises(ValueError, match="a length of 200 is too short"):
        grid().sample(200, 0)
    with pytest.raises(ValueError, match="essays x have the needle"):
        grid(essays=Essays(name="x", text=f"So. {NEEDLE} So."))
