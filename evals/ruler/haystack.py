"""How long a haystack may be, and how needles get into it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from random import Random

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# How deep needles lie in an essay, in percent: forty points.
DEPTHS = [round(100 * point / 39) for point in range(40)]


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
