"""What stays of a text, token by token: its pieces, and the text with what went marked."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from inertiakv import Decoder, TextStream
from inertiakv.cache.retention import EMPTY

MOST_SHOWN = 200
"""Evicted tokens in a row that a terminal shows, greyed; of more only the number."""
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Pictures of control characters, which must not reach a terminal or a page."""
_KEPT, _EVICTED, _PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, special ones by their names, control characters as their pictures. A
    character of several tokens is added by the last one."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    texts, stream = [""], TextStream(tokenizer)
    for token in ids:
        if token in special:
            texts[-1] += stream.end()
            texts.append(tokenizer.convert_ids_to_tokens(token))
            stream = TextStream(tokenizer)
        else:
            texts.append(stream.push(token))
    texts[-1] += stream.end()
    return [text.translate(_CONTROL) for text in texts[1:]]


def marked(texts: Sequence[str], kept: Sequence[bool], *, colour: bool = False) -> str:
    """The text. In the place of what went stands a dot for one token, and a count for more; or, in colour,
    what went is grey, and what stays green."""
    return "".join(_parts(texts, kept, colour))


def _parts(texts: Sequence[str], kept: Sequence[bool], colour: bool) -> Iterator[str]:
    tokens = zip(kept, texts, strict=True)
    for stays, group in itertools.groupby(tokens, key=lambda token: token[0]):
        run = [text for _, text in group]
        if stays:
            yield f"{_KEPT}{''.join(run)}{_PLAIN}" if colour else "".join(run)
        elif colour and len(run) <= MOST_SHOWN:
            yield f"{_EVICTED}{''.join(run)}{_PLAIN}"
        else:
            yield "·" if len(run) == 1 else f"[…{len(run)}…]"


class KeptTokens:
    """What one policy keeps of prompts, which may be answered in several batches."""

    def __init__(self, policy: str, prompts: Sequence[Sequence[int]]) -> None:
        self.policy, self.prompts = policy, prompts
        self.positions: list[list[int]] = [[] for _ in prompts]
        """Of each prompt, those that at least one retention set holds, its answer's among them."""
        self.sets = 1

    def take(self, decoder: Decoder, places: Iterable[int]) -> None:
        """From the cache of a decoder that has just answered the prompts at these places."""
        assert decoder.cache is not None
        tables = [sets.position_BXN for sets in decoder.cache.retention]
        self.sets = sum(table.shape[1] for table in tables)
        for row, place in enumerate(places):
            held = {position for table in tables for position in table[row].flatten().tolist()}
            self.positions[place] = sorted(held - {EMPTY})

    def text(self, tokenizer: Any, colour: bool) -> str:
        """The prompts with what is kept of them, each below a line that says how much that is."""
        return "\n\n".join(self._prompt(tokenizer, place, colour) for place in range(len(self.prompts)))

    def _prompt(self, tokenizer: Any, place: int, colour: bool) -> str:
        prompt, held = self.prompts[place], set(self.positions[place])
        kept = [position in held for position in range(len(prompt))]
        where = f"prompt {place + 1}, {self.policy}" if len(self.prompts) > 1 else self.policy
        sets = f" in at least one of {self.sets} sets" if self.sets > 1 else ""
        head = f"{where}: {sum(kept):,} of the prompt's {len(prompt):,} tokens are kept{sets}"
        return f"{head}\n{marked(pieces(tokenizer, prompt), kept, colour=colour)}"


def in_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")
