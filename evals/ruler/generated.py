"""What RULER's tasks have in common: a haystack of as many units as fit a length, with needles in it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from ..metrics import string_match_all
from ..task import CountTokens, Sample

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

DEPTHS = [round(100 * point / 39) for point in range(40)]
"""Where needles may lie in an essay, in percent."""


@dataclass(frozen=True)
class Draw:
    """A prompt, before it is known to be the right one."""

    prompt: str
    answer_prefix: str
    references: tuple[str, ...]
    facts: dict[str, Any]


class Generated(ABC):
    """A task of RULER. A subclass draws prompts of any number of units: words, lines, documents.

    Tokens fed (chat template, BOS and answer prefix included) and `max_new_tokens` make up the length, or a
    little less. RULER counts likewise, but without BOS.

    Every sample has a random generator of its own, seeded with the seed, the task, the length and the index.
    RULER draws all samples of a task from one, so that each depends on those before it."""

    lengths = True
    metric = "string_match_all"
    match: Callable[[str, Sequence[str]], float] = staticmethod(string_match_all)
    max_new_tokens: int

    def __init__(self, name: str, count_tokens: CountTokens, seed: int) -> None:
        self.name = f"ruler:{name}"
        self.count_tokens = count_tokens
        self.seed = seed

    @abstractmethod
    def bounds(self, length: int, index: int) -> tuple[int, int | None]:
        """The least and the most units that make sense; None: there is no end of them."""

    @abstractmethod
    def draw(self, rng: Random, length: int, index: int, units: int) -> Draw:
        """The prompt of so many units. What is asked is drawn first, the same for any number of them."""

    def count(self, length: int | None) -> int | None:
        return None

    def sample(self, length: int | None, index: int) -> Sample:
        assert length is not None

        @cache
        def draw(units: int) -> tuple[Draw, int]:
            rng = Random(f"{self.seed}/{self.name}/{length}/{index}")
            drawn = self.draw(rng, length, index, units)
            return drawn, self.count_tokens(drawn.prompt, drawn.answer_prefix)

        least, most = self.bounds(length, index)
        needed = draw(least)[1] + self.max_new_tokens
        if needed > length:
            raise ValueError(
                f"{self.name}, sample {index}: a length of {length} tokens is too short, "
                f"at least {needed} are needed"
            )
        units = most_units(lambda n: draw(n)[1], length - self.max_new_tokens, least, most)
        drawn, _ = draw(units)
        return Sample(
            task=self.name,
            length=length,
            index=index,
            prompt=drawn.prompt,
            answer_prefix=drawn.answer_prefix,
            references=drawn.references,
            max_new_tokens=self.max_new_tokens,
            facts=drawn.facts | {"units": units},
        )

    def score(self, prediction: str, sample: Sample) -> float:
        return self.match(prediction, sample.references)


def most_units(tokens: Callable[[int], int], limit: int, least: int, most: int | None = None) -> int:
    """The largest number of units that makes no more tokens than `limit`, up to a 500th of `limit`.

    `tokens` says how many tokens a number of units makes, and `least` units are known to fit. Long prompts
    take long to count, so the search goes where the tokens per unit found so far point to, and halves what
    is left where that is no help."""
    low, at_low = least, tokens(least)
    assert at_low <= limit
    at_least = at_low
    high = sys.maxsize if most is None else most + 1  # the smallest number known to be too large
    guess = least + 16
    while high - low > 1 and limit - at_low > limit // 500:
        if guess >= high:
            guess = (low + high) // 2
        at_guess = tokens(guess)
        per_unit = max((at_guess - at_least) / (guess - least), 0.1)
        if at_guess <= limit:
            low, at_low = guess, at_guess
        else:
            high = guess
        guess = low + max(1, int((limit - at_low) / per_unit))
    return low


def hide_in_lines(rng: Random, lines: Sequence[str], needles: Sequence[str]) -> tuple[list[str], list[int]]:
    """The lines with the needles between them, in their order, each before another line, and the needles'
    depths in percent."""
    places = sorted(rng.sample(range(len(lines)), len(needles)))
    hidden = list(lines)
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        hidden.insert(place, needle)
    return hidden, [round(100 * place / len(lines)) for place in places]


def hide_in_sentences(rng: Random, sentences: Sequence[str], needles: Sequence[str]) -> tuple[str, list[int]]:
    """A text with the needles between its sentences, in their order, and the needles' depths in percent.

    As in RULER a needle at the very beginning or end has a space on its outer side, too, and so have two
    needles at one place between them."""
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    parts: list[str] = []
    start = 0
    for depth, needle in zip(depths, needles, strict=True):
        place = len(sentences) * depth // 100
        parts += [" ".join(sentences[start:place]), needle]
        start = place
    return " ".join([*parts, " ".join(sentences[start:])]), depths
