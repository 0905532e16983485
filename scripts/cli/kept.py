"""What stays of a text, token by token: its pieces, and the text with what went marked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from inertiakv import Decoder, TextStream

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


def kept_positions(decoder: Decoder) -> list[list[int]]:
    """Of each row, the positions that at least one retention set of its cache holds, in order."""
    assert decoder.cache is not None
    held: list[set[int]] = [set() for _ in range(decoder.cache.shape.batch)]
    for sets in decoder.cache.retention:
        for row, positions in zip(held, sets.position_BXN.flatten(1).tolist(), strict=True):
            row.update(positions)
    return [sorted(position for position in row if position >= 0) for row in held]


def describe(
    title: str, tokenizer: Any, prompt: Sequence[int], positions: Sequence[int], colour: bool
) -> str:
    """A prompt with what is kept of it, below a line that says how much that is."""
    held = set(positions)
    kept = [position in held for position in range(len(prompt))]
    answer = len(positions) - sum(kept)
    head = (
        f"{title}: {sum(kept):,} of the prompt's {len(prompt):,} tokens are kept, {answer:,} of the answer's"
    )
    return f"{head}\n{marked(pieces(tokenizer, prompt), kept, colour=colour)}"
