"""What a script prints: answers to stdout while they are decoded, progress to stderr."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from tqdm import tqdm

from inertiakv import StopStrings, TextStream
from inertiakv.models.encoding import decode_answer
from inertiakv.scripts.cli.program import say


class PrefillBar:
    """Progress of a prefill of `total` tokens, for `Decoder.generate(progress=...)`: a bar on a terminal, one
    line elsewhere."""

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


class Detokenizer:
    """Token ids of an answer to its text: without the token that ended it, and up to a stop string."""

    def __init__(self, tokenizer: Any, eos_ids: Collection[int], stop: StopStrings | None) -> None:
        self.tokenizer, self.eos_ids, self.stop = tokenizer, eos_ids, stop

    def text(self, tokens: list[int]) -> str:
        return self.cut(decode_answer(self.tokenizer, tokens, self.eos_ids))

    def cut(self, text: str) -> str:
        return text if self.stop is None else self.stop.cut(text)


class StreamPrinter:
    """Prints one answer while it is decoded: `Decoder.generate(stop=...)` calls it with all tokens so far.

    Text that may be the beginning of a stop string is printed once it is clear that it is not.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.stream = TextStream(detokenizer.tokenizer)
        self.text = ""
        self.printed = 0
        self.last_break = 0
        """Characters printed when the last line break for a message was made."""

    def __call__(self, row: int, tokens: list[int]) -> bool:
        """Whether a stop string has come."""
        if tokens[-1] not in self.detokenizer.eos_ids:
            self.text += self.stream.push(tokens[-1])
        stop = self.detokenizer.stop
        starts = {s[:n] for s in stop.strings for n in range(1, len(s))} if stop else set()
        undecided = max((len(start) for start in starts if self.text.endswith(start)), default=0)
        self._print(self.text[: len(self.text) - undecided])
        return stop is not None and stop(row, tokens)

    def say(self, text: str) -> None:
        """`say`, on a line of its own where a terminal shows the answer, too."""
        if sys.stdout.isatty() and self.printed > self.last_break:
            text, self.last_break = "\n" + text, self.printed
        say(text)

    def end(self) -> None:
        self.text += self.stream.end()
        self._print(self.text)
        print(flush=True)

    def _print(self, text: str) -> None:
        new = self.detokenizer.cut(text)[self.printed :]
        if new:
            print(new, end="", flush=True)
            self.printed += len(new)
