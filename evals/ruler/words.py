"""Lists of words, and the tasks that count them: cwe, fwe."""

from __future__ import annotations

import math
import string
from functools import cache
from importlib.resources import files
from random import Random

from inertiakv.models.extras import install

from .generated import Draw, Generated
from .templates import COMMON_WORDS, FREQUENT_WORDS


@cache
def word_list(kind: str) -> list[str]:
    """Sorted, without repetition. kind: `noun`, `adjective` or `verb`."""
    try:
        path = files("wonderwords.assets") / f"{kind}list.txt"
    except ImportError as error:
        raise ImportError(f"RULER takes its words from the package wonderwords: {install('eval')}") from error
    return sorted({line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()})


def adjective_noun(rng: Random) -> str:
    return f"{rng.choice(word_list('adjective'))}-{rng.choice(word_list('noun'))}"


@cache
def all_words() -> list[str]:
    return sorted({word for kind in ("noun", "adjective", "verb") for word in word_list(kind)})


class CommonWords(Generated):
    """A numbered list in which ten words are more common than the others, after a shorter one with its
    answer. Units are different words. Where there are no more of them, at 128k tokens or beyond, RULER goes
    over to another collection of words; here the list ends, and the prompt is shorter than it might be."""

    max_new_tokens = COMMON_WORDS.max_new_tokens
    common = 10

    def bounds(self, length: int, index: int) -> tuple[int, int | None]:
        return self.common + 1, len(all_words())

    def draw(self, rng: Random, length: int, index: int, units: int) -> Draw:
        if length < 4096:
            (shown, *shown_times), times = (20, 3, 1), (6, 1)
        else:
            (shown, *shown_times), times = (40, 10, 3), (30, 3)
        answer, prompt = self._list(rng, rng.sample(all_words(), shown), *shown_times)
        example = f"{prompt}{COMMON_WORDS.answer_prefix} {_numbered(answer)}"
        answer, prompt = self._list(rng, rng.sample(all_words(), len(all_words()))[:units], *times)
        return Draw(f"{example}\n{prompt}", COMMON_WORDS.answer_prefix, tuple(answer), {})

    def _list(self, rng: Random, words: list[str], often: int, seldom: int) -> tuple[list[str], str]:
        """The common words, and the prompt."""
        common, others = words[: self.common], words[self.common :]
        listed = common * often + others * seldom
        rng.shuffle(listed)
        return common, COMMON_WORDS.prompt.format(context=_numbered(listed))


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


class FrequentWords(Generated):
    """A text of coded words whose frequencies fall with the square of their rank. The first one is dots,
    which do not count; the three after it are asked for. Units are the words there would be if the
    vocabulary, which grows with the length, had no end."""

    max_new_tokens = FREQUENT_WORDS.max_new_tokens
    letters = 6
    alpha = 2.0
    zeta = math.pi**2 / 6  # of alpha

    def bounds(self, length: int, index: int) -> tuple[int, int | None]:
        # With fewer units the fourth word may be no more frequent than the fifth.
        return math.ceil(2 * self.zeta * 4**self.alpha), None

    def draw(self, rng: Random, length: int, index: int, units: int) -> Draw:
        vocabulary: dict[str, None] = {}
        while len(vocabulary) < max(5, (length - self.max_new_tokens) // 50):
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=self.letters))] = None
        ranked = ["...", *list(vocabulary)[1:]]
        words: list[str] = []
        for rank, word in enumerate(ranked, start=1):
            words += [word] * int(units * rank**-self.alpha / self.zeta)
        rng.shuffle(words)
        prompt = FREQUENT_WORDS.prompt.format(context=" ".join(words))
        return Draw(prompt, FREQUENT_WORDS.answer_prefix, tuple(ranked[1:4]), {})
