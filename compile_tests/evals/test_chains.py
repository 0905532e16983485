"""Chains: what a sample asks for, worked out again from its prompt alone, and what its score is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_tests.examples import share
from compile_tests.tiny_chat import tiny_tokenizer
from inertiakv.evals import chains
from inertiakv.evals.chains import FEWEST_STEPS, TASKS
from inertiakv.evals.task import Prompting, Sample

PROMPTING = Prompting(tiny_tokenizer("llama"), "chat")
GIVEN = {"chains:copy": 24, "chains:sum": 8}  # two rounds


def task(name: str, **options: Any) -> chains.Chains:
    return chains.Chains(name, PROMPTING, **options)


def given_list(sample: Sample) -> list[str]:
    found = re.search(r"^List: (.*)$", sample.prompt, re.MULTILINE)
    assert found
    return found[1].split(", ")


def given_start(sample: Sample) -> str:
    found = re.search(r"^Start: (.*)$", sample.prompt, re.MULTILINE)
    assert found
    return found[1]


def copied(sample: Sample, steps: int) -> list[str]:
    words = given_list(sample)
    return [words[step % len(words)] for step in range(steps)]


def summed(sample: Sample, steps: int) -> list[str]:
    total, addends = int(given_start(sample)), given_list(sample)
    lines = []
    for step in range(steps):
        word, addend = addends[step % len(addends)].split()
        lines.append(f"{word} {addend}, {total} + {addend} = {total + int(addend)}")
        total += int(addend)
    return lines


ANSWERS: dict[str, Callable[[Sample, int], list[str]]] = dict(zip(TASKS, (copied, summed), strict=True))


@pytest.mark.parametrize("name", TASKS)
@given(length=st.integers(1200, 5000), index=st.integers(0, 1000), seed=st.integers(0, 5))
@share(8)
def test_answers_follow_from_the_prompt_and_fill_the_length(
    name: str, length: int, index: int, seed: int
) -> None:
    sample = task(name, seed=seed).sample(length, index)
    asked = re.search(r"Steps 1 to (\d+):\n$", sample.prompt)
    assert asked
    steps, begun = int(asked[1]), GIVEN[name]
    lines = [f"{number}: {line}" for number, line in enumerate(ANSWERS[name](sample, steps), 1)]
    assert sample.answer_prefix == "\n".join([*lines[:begun], f"{begun + 1}:"])
    assert sample.references == ("\n".join(lines[begun:]),)
    assert sample.facts["steps"] == steps - begun >= FEWEST_STEPS

    answer = sample.references[0].removeprefix(f"{begun + 1}:")
    prompt_tokens = PROMPTING.count(sample.prompt, sample.answer_prefix)
    assert prompt_tokens + sample.max_new_tokens == length
    taken = PROMPTING.count(sample.prompt, sample.answer_prefix + answer) - prompt_tokens
    assert taken < sample.max_new_tokens <= taken + 80  # with its end, and no further step would go in
    assert sample == task(name, seed=seed).sample(length, index)


@pytest.mark.parametrize("name", TASKS)
def test_scores_cannot_be_had_for_nothing(name: str) -> None:
    chain = task(name)
    sample = chain.sample(3000, 0)
    whole = sample.references[0].split(":", 1)[1]
    lines, steps = whole.split("\n"), sample.facts["steps"]
    assert chain.score(whole, sample) == 1
    assert chain.score(whole + "\nThat is all.", sample) == 1
    assert chain.score("", sample) == chain.score("\n\n", sample) == 0
    assert chain.score(lines[0], sample) == pytest.approx(1 / steps)
    assert chain.score("\n".join(lines[:4]) + "\n", sample) == pytest.approx(4 / steps)
    assert chain.score("\n".join([*lines[:4], "17: no", *lines[5:]]), sample) == pytest.approx(4 / steps)
    assert chain.score("\n".join(lines[1:]), sample) == 0
    # The number that is given may be said again.
    given = sample.answer_prefix.splitlines()[-1]
    assert chain.score(f"\n{given}{whole}", sample) == chain.score(f" {given}{whole}", sample) == 1
    # The rounds given, over and over, are right for a copy alone.
    rounds = sample.answer_prefix.split("\n")[:-1]
    again = [rounds[at % len(rounds)].split(": ")[1] for at in range(steps)]
    repeated = "\n".join(f"{at + len(rounds) + 1}: {line}" for at, line in enumerate(again))
    score = chain.score(repeated.split(":", 1)[1], sample)
    assert score == 1 if name == "chains:copy" else score < 0.1


def test_samples_differ_and_do_not_depend_on_each_other() -> None:
    chain = task("chains:sum")
    assert chain.count(2000) is None
    prompts = {chain.sample(2000, index).prompt for index in range(20)}
    assert len(prompts) == 20
    assert task("chains:sum", seed=1).sample(2000, 3) != task("chains:sum", seed=2).sample(2000, 3)


def test_errors() -> None:
    with pytest.raises(ValueError, match="a length of 300 is too short for 8 steps of chains:sum"):
        task("chains:sum").sample(300, 0)
