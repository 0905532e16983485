"""From token ids to text on the host: strings that end a row, and text that appears as its tokens do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Ends a row as soon as its answer's text contains one of the strings; for `stop=` of a `Decoder`."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        if not strings or not all(strings):
            raise ValueError(f"stop strings must be non-empty, got {list(strings)!r}")
        self.tokenizer, self.strings = tokenizer, list(strings)

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
    back."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        """The text that this token adds."""
        self._tokens.append(token)
        return self._emit(
            self.tokenizer.decode(self._tokens, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
        )

    def end(self) -> str:
        """What was held back."""
        return self._emit(self.tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _emit(self, text: str) -> str:
        piece, self._shown = text[len(self._shown) :], text
        return piece
