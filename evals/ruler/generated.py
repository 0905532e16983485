"""What RULER's tasks have in common: a prompt of as many units of haystack as fit a length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from ..metrics import string_match_all
from ..task import CountTokens, Sample
from .haystack import most_units


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
        def draw(units: int) -> Draw:
            rng = Random(f"{self.seed}/{self.name}/{length}/{index}")
            return self.draw(rng, length, index, units)

        @cache
        def tokens(units: int) -> int:
            drawn = draw(units)
            return self.count_tokens(drawn.prompt, drawn.answer_prefix)

        least, most = self.bounds(length, index)
        needed = tokens(least) + self.max_new_tokens
        if needed > length:
            raise ValueError(
                f"{self.name}, sample {index}: a length of {length} tokens is too short, "
                f"at least {needed} are needed"
            )
        units = most_units(tokens, length - self.max_new_tokens, least, most)
        drawn = draw(units)
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
