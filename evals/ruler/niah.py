"""Needles in a haystack: niah_single_*, niah_multikey_*, niah_multivalue, niah_multiquery."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from ..essays import Essays, split_sentences
from ..task import CountTokens
from .generated import NOISE, Draw, Generated, hide_in_lines, hide_in_sentences
from .templates import NEEDLE, NIAH, NIAH_ONE
from .words import adjective_noun

Kind = Literal["words", "numbers", "uuids"]

# Beside fewer words of essay a needle would not be hidden.
_ESSAY_WORDS_A_NEEDLE = 20


@dataclass(frozen=True)
class Needles:
    """Parameters of a task, as in RULER's `synthetic.yaml`."""

    haystack: Literal["noise", "essay", "needle"]
    """`noise`: lines of five sentences, always the same; `needle`: needles that nobody asks for."""
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    """To each key."""
    queries: int = 1
    """Keys that are asked for."""


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}

_RANDOM: dict[Kind, Callable[[Random], str]] = {
    "words": adjective_noun,
    "numbers": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


class Niah(Generated):
    """Units are words of an essay, or lines. Keys and values of a prompt are all different, those of needles
    that make up a haystack included: RULER leaves that to chance."""

    max_new_tokens = NIAH.max_new_tokens

    def __init__(self, name: str, count_tokens: CountTokens, seed: int, essays: Essays) -> None:
        super().__init__(name, count_tokens, seed)
        self.needles = NEEDLES[name]
        self.essays = essays

    def bounds(self, length: int, index: int) -> tuple[int, int | None]:
        count = self.needles.keys * self.needles.values
        return count * (_ESSAY_WORDS_A_NEEDLE if self.needles.haystack == "essay" else 1), None

    def draw(self, rng: Random, length: int, index: int, units: int) -> Draw:
        needles = self.needles
        taken: set[str] = set()
        pairs: list[tuple[str, str]] = []
        for _ in range(needles.keys):
            key = _fresh(rng, needles.key, taken)
            pairs += [(key, _fresh(rng, needles.value, taken)) for _ in range(needles.values)]
        queries = rng.sample(list(dict(pairs)), needles.queries)
        rng.shuffle(pairs)

        hidden = [self._line(*pair) for pair in pairs]
        facts: dict[str, Any] = {"keys": queries}
        if needles.haystack == "essay":
            sentences = split_sentences(self.essays.take(units))
            context, depths = hide_in_sentences(rng, sentences, hidden)
            facts["essays"] = self.essays.name
        else:
            lines, depths = hide_in_lines(rng, self._lines(rng, units, taken), hidden)
            context = "\n".join(lines)

        asked = [
            (value, depth)
            for query in queries
            for (key, value), depth in zip(pairs, depths, strict=True)
            if key == query
        ]
        facts["depths"] = [depth for _, depth in asked]
        one = len(asked) == 1
        template = NIAH_ONE if one else NIAH
        kind = needles.value.removesuffix("s") if one else needles.value
        query = ", ".join(queries[:-1]) + ", and " + queries[-1] if len(queries) > 1 else queries[0]
        return Draw(
            prompt=template.prompt.format(kind=kind, context=context, query=query),
            answer_prefix=template.answer_prefix.format(kind=kind, query=query),
            references=tuple(value for value, _ in asked),
            facts=facts,
        )

    def _lines(self, rng: Random, count: int, taken: set[str]) -> list[str]:
        if self.needles.haystack == "noise":
            return [NOISE] * count
        kinds = self.needles.key, self.needles.value
        return [self._line(*(_fresh(rng, kind, taken) for kind in kinds)) for _ in range(count)]

    def _line(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.needles.value, key=key, value=value)


def _fresh(rng: Random, kind: Kind, taken: set[str]) -> str:
    """One that is not taken yet, and now is."""
    while (word := _RANDOM[kind](rng)) in taken:
        pass
    taken.add(word)
    return word
