"""Text to stdout as it comes; progress to stderr."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from tqdm import tqdm

from inertiakv import StopStrings, TextStream
from inertiakv.models.encoding import decode_answer


def say(text: str) -> None:
    """Tells the user what goes on."""
    print(text, file=sys.stderr, flush=True)


class PrefillBar:
    """Progress of prompts of `total` tokens in all, for `progress=` of a decoder. A bar on a terminal,
    elsewhere a line."""

    def __init__(self, total: int) -> None:
        self.bar = tqdm(total=total, desc="prefill", unit=" tokens", disable=None, leave=False)
        if self.bar.disable:
            say(f"prefill of {total:,} tokens ...")

    def __call__(self, done: int, total: int) -> None:
        self.bar.update(done - self.bar.n)
        if done == total:
            self.close()

    def close(self) -> None:
        self.bar.close()


class Answer:
    """The text of an answer's tokens: without the token that ended it, and up to a stop string."""

    def __init__(self, tokenizer: Any, eos_ids: Collection[int], stop: StopStrings | None) -> None:
        self.tokenizer, self.eos_ids, self.stop = tokenizer, eos_ids, stop

    def text(self, tokens: list[int]) -> str:
        text = decode_answer(self.tokenizer, tokens, self.eos_ids)
        return text if self.stop is None else self.stop.cut(text)


class LiveAnswer:
    """Prints one answer as it comes. For `stop=` of a decoder, which hands it every token, and which it tells
    when a stop string has come; the beginning of one is held back until it is clear that it is none."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.stream = TextStream(answer.tokenizer)
        self.text, self.shown, self.broken_at = "", 0, 0

    def __call__(self, row: int, tokens: list[int]) -> bool:
        if tokens[-1] not in self.answer.eos_ids:
            self.text += self.stream.push(tokens[-1])
        stop = self.answer.stop
        self._show(self.text[: len(self.text) - self._undecided()] if stop else self.text)
        return stop is not None and stop(row, tokens)

    def say(self, text: str) -> None:
        """As `say`, on a line of its own where a terminal shows the answer as well."""
        if sys.stdout.isatty() and self.shown > self.broken_at:
            text, self.broken_at = "\n" + text, self.shown
        say(text)

    def end(self) -> None:
        self.text += self.stream.end()
        self._show(self.text)
        print(flush=True)

    def _undecided(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        assert self.answer.stop is not None
        beginnings = {s[:n] for s in self.answer.stop.strings for n in range(1, len(s))}
        return max((len(start) for start in beginnings if self.text.endswith(start)), default=0)

    def _show(self, text: str) -> None:
        if self.answer.stop is not None:
            text = self.answer.stop.cut(text)
        if len(text) > self.shown:
            print(text[self.shown :], end="", flush=True)
            self.shown = len(text)
