"""A needle in a haystack of essays, on a grid of lengths and depths.

Needle, question and prompt are the common ones (San Francisco, a sandwich, Dolores Park). The needle goes to
the last full stop before its depth, so that it breaks no sentence; at 100 % it is the end of the text. Where
no full stop is near, it goes between two words, or else two letters. What differs from one publication to the
next is chosen so: 50 new tokens at most, and ROUGE-L F, by the package that the metric names, of the whole
answer against the needle's sentence. A right answer that does not repeat the question scores less than one
that does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from . import metrics
from .essays import Essays
from .task import Prompting, Sample

TASKS = ("niah",)
NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
PROMPT = (
    "This is a very long story book: <book> {haystack} </book>.\n"
    " Based on the content of the book, Question: The best thing to do in San Francisco is: \nAnswer:"
)
DEPTHS = tuple(range(0, 101, 10))
MAX_NEW_TOKENS = 50
_LETTERS_A_TOKEN = 16
"""More than any prose has."""
_LONGEST_SENTENCE = 1000
"""In letters. What goes on without a full stop for longer is no sentence."""
_LONGEST_WORD = 40
_FULL_STOP = re.compile(r"[.!?](?=\s)|[。！？]")


class NeedleGrid:
    """A sample for each depth, first the ends and then each farthest from those before: so the first few
    samples are spread over the prompt. The haystack begins where the essays do."""

    name = "niah"
    lengths = True

    def __init__(self, prompting: Prompting, essays: Essays | None, depths: Sequence[float] = DEPTHS) -> None:
        assert essays is not None
        if NEEDLE in essays.text:
            raise ValueError(f"the essays {essays.name} have the needle in them already")
        self.metric = metrics.rouge_l_title()
        self.depths = _spread(depths)
        self._prompting = prompting
        self._essays = essays
        self._ids = lru_cache(maxsize=1)(self._encode)

    def count(self, length: int | None) -> int:
        return len(self.depths)

    def sample(self, length: int | None, index: int) -> Sample:
        assert length is not None
        limit = length - MAX_NEW_TOKENS
        room = limit - self._prompting.count(PROMPT.format(haystack=f"\n{NEEDLE}\n"))
        while room > 0:
            ids = self._ids(length)[:room]
            haystack = self._prompting.tokenizer.decode(ids).rstrip("\ufffd")
            if not haystack:
                break
            at = needle_place(haystack, self.depths[index])
            prompt = PROMPT.format(haystack=f"{haystack[:at]}\n{NEEDLE}\n{haystack[at:]}")
            excess = self._prompting.count(prompt) - limit
            if excess <= 0:
                return Sample(
                    task=self.name,
                    length=length,
                    index=index,
                    prompt=prompt,
                    answer_prefix="",
                    references=(NEEDLE,),
                    max_new_tokens=MAX_NEW_TOKENS,
                    facts={
                        "depth": self.depths[index],
                        "placed": round(100 * at / len(haystack), 2),
                        "essays": self._essays.name,
                    },
                )
            room -= excess
        raise ValueError(
            f"a length of {length} is too short for needle, question and {MAX_NEW_TOKENS} tokens"
        )

    def score(self, prediction: str, sample: Sample) -> float:
        return metrics.best(metrics.rouge_l, prediction.strip(), sample.references)

    def _encode(self, length: int) -> list[int]:
        """Tokens of the essays, `length` of them and more."""
        text, letters = self._essays.text + "\n", _LETTERS_A_TOKEN * length
        text = (text * (letters // len(text) + 1))[:letters]
        ids: list[int] = self._prompting.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def _spread(depths: Sequence[float]) -> tuple[float, ...]:
    left = sorted(depths)
    order = [left.pop(0)]
    while left:
        farthest = max(left, key=lambda depth: min(abs(depth - before) for before in order))
        left.remove(farthest)
        order.append(farthest)
    return tuple(order)


def needle_place(haystack: str, depth: float) -> int:
    """Where in the haystack the needle goes: behind the last full stop before this depth, in percent, or
    behind a word where no full stop is near."""
    if depth == 100:
        return len(haystack)
    at = int(len(haystack) * depth / 100)
    stop = max((stop.end() for stop in _FULL_STOP.finditer(haystack, 0, at)), default=0)
    if at - stop <= _LONGEST_SENTENCE and (stop or _FULL_STOP.search(haystack)):
        return stop
    space = re.search(r"\s\S*\Z", haystack[max(0, at - _LONGEST_WORD) : at])
    return at - len(space[0]) if space else at
