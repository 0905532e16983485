"""What a script prints: answers to stdout while they are decoded, progress to stderr."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tqdm import tqdm

from inertiakv import StopStrings, TextStream
from inertiakv.models.encoding import decode_answer
from inertiakv.scripts.cli.program import say
from inertiakv.scripts.cli.screen import SCREEN

COMPILE_TIME = "some 10 to 30 seconds the first time"


def tell_compile(what: str) -> None:
    """For `Decoder(on_compile=...)`."""
    SCREEN.status(f"compiling the {what} ({COMPILE_TIME}) ...")


def tell_draft(number: int, drafts: int) -> None:
    """For `Decoder(on_draft=...)`."""
    SCREEN.status(f"rehearsing the answer: draft {number} of {drafts} ...")


class PrefillBar:
    """Progress of a prefill, for `Decoder.generate(progress=...)`: a bar on a terminal, one line elsewhere.
    Without a `total` of tokens it is shown once it is known that there is more to read."""

    def __init__(self, total: int | None = None, label: str = "") -> None:
        self.label = label
        self.bar = None if total is None else self._begin(total)

    def _begin(self, total: int) -> tqdm:
        SCREEN.wipe()
        bar = tqdm(total=total, desc=f"prefill{self.label}", unit=" tokens", disable=None, leave=False)
        if bar.disable:
            say(f"prefill of {total:,} tokens{self.label} ...")
        return bar

    def __call__(self, done: int, total: int) -> None:
        if self.bar is None and done < total:
            self.bar = self._begin(total)
        if self.bar is not None:
            self.bar.update(done - self.bar.n)
        if done == total:
            self.close()

    def close(self) -> None:
        if self.bar is not None:
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

    Text that may be the beginning of a stop string is printed once it is clear that it is not. That of the
    first token waits for the second: between them drafts are decoded and steps are compiled, and what is said
    of it comes before the answer.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.stream = TextStream(detokenizer.tokenizer)
        self.text = ""
        self.printed = 0

    def __call__(self, row: int, tokens: list[int]) -> bool:
        """Whether a stop string has come."""
        if tokens[-1] not in self.detokenizer.eos_ids:
            self.text += self.stream.push(tokens[-1])
        stop = self.detokenizer.stop
        starts = {s[:n] for s in stop.strings for n in range(1, len(s))} if stop else set()
        undecided = max((len(start) for start in starts if self.text.endswith(start)), default=0)
        if len(tokens) > 1:
            self._print(self.text[: len(self.text) - undecided])
        return stop is not None and stop(row, tokens)

    def end(self) -> None:
        self.text += self.stream.end()
        self._print(self.text)
        SCREEN.write("\n")

    def _print(self, text: str) -> None:
        new = self.detokenizer.cut(text)[self.printed :]
        if new:
            SCREEN.write(new)
            self.printed += len(new)
