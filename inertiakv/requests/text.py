"""From token ids to text: stop strings, and text that streams with its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class StopStrings:
    """Ends a row as soon as its answer's text contains one of the strings; for `stop=` of a `Decoder`.

    It sees the answer of one `generate`, `stream` or `decode`: not a string that one call begins and another
    ends. Raises ValueError where there are no strings, or one is empty.
    """

    def __init__(self, tokenizer: Any, strings: str | Sequence[str]) -> None:
        given = (
            [strings] if isinstance(strings, str) else list(strings) if isinstance(strings, Iterable) else []
        )
        if not given or not all(isinstance(string, str) and string for string in given):
            raise ValueError(f"stop strings must be non-empty, got {strings!r}")
        self.tokenizer, self.strings = tokenizer, given

    def __call__(self, row: int, tokens: list[int]) -> bool:
        # A token is at least one byte, so a stop string that just ended lies within as many tokens as it has
        # bytes.
        tail = tokens[-max(len(string.encode()) for string in self.strings) - 1 :]
        text = self.tokenizer.decode(tail)
        return any(string in text for string in self.strings)

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        return text[: min((text.find(s) for s in self.strings if s in text), default=len(text))]


class TextStream:
    """Text of a growing list of tokens, piece by piece. A character whose last bytes are yet to come is held
    back.

    Each piece is the difference that a token makes to the text of the few tokens before it, since a token's
    own text may depend on its neighbours (spaces between words), and the whole text need not be made again.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tail: list[int] = []  # tokens of the last piece, then those not shown yet
        self._shown = 0  # how many of them are shown

    def push(self, token: int) -> str:
        """The text that this token adds."""
        self._tail = [*self._tail, token]  # a new list: copies of a stream go on apart
        return "" if self._text(self._tail).endswith("\N{REPLACEMENT CHARACTER}") else self.end()

    def end(self) -> str:
        """What was held back."""
        before, now = self._text(self._tail[: self._shown]), self._text(self._tail)
        if len(now) > len(before):
            self._tail = self._tail[self._shown :]
            self._shown = len(self._tail)
        return now[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text
