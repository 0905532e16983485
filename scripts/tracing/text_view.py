"""A text with its tokens coloured by utility and the evicted ones struck out: as a page, in a terminal."""

from __future__ import annotations

import html
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from inertiakv import TextStream

LEVELS = 8
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Control characters of a text must not reach a terminal, and no page may contain them: their pictures do."""
_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Which tokens are kept</title>
<style>
:root {{ color-scheme: light dark; font-family: system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.7 }}
.e {{ text-decoration: line-through; opacity: .55 }}
{levels}
</style>
<h1>Which tokens are kept</h1>
<p>{legend}</p>
{sections}
</html>
"""
_LEGEND = (
    "A token's colour is the rank of its utility, the last one it had: {scale}. "
    '<span class="e">Struck out</span> is what was evicted. Point at a token for its numbers.'
)


@dataclass(frozen=True)
class Token:
    text: str
    utility: float
    """The last one that it had; NaN where it went before the first step."""
    gone: int | None
    """The step, from 1, at which it was evicted, 0 for before that. None for a token that is kept."""


@dataclass(frozen=True)
class View:
    title: str
    tokens: list[Token]

    @property
    def levels(self) -> list[int]:
        """Utilities as one of `LEVELS` levels, each with as many tokens; equal ones are on the same."""
        utilities = [-math.inf if math.isnan(token.utility) else token.utility for token in self.tokens]
        rank = {utility: i for i, utility in enumerate(sorted(utilities))}
        return [LEVELS * rank[utility] // len(utilities) for utility in utilities]

    @property
    def heading(self) -> str:
        kept = sum(token.gone is None for token in self.tokens)
        return f"{self.title}: {kept:,} of {len(self.tokens):,} tokens are kept"


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, special ones by their names, control characters as their pictures. Of a
    character that several tokens make up the last one has it all."""
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


def page(views: Sequence[View]) -> str:
    """A self-contained HTML page."""
    levels = "\n".join(
        f".u{i} {{ background: rgb(255 150 0 / {0.75 * i / (LEVELS - 1):.2f}) }}" for i in range(LEVELS)
    )
    scale = " ".join(f'<span class="u{i}">{i + 1}</span>' for i in range(LEVELS))
    return _PAGE.format(
        levels=levels, legend=_LEGEND.format(scale=scale), sections="\n".join(map(_section, views))
    )


def _section(view: View) -> str:
    spans = []
    for position, (token, level) in enumerate(zip(view.tokens, view.levels, strict=True)):
        gone = "" if token.gone is None else f", evicted at step {token.gone}"
        title = f"position {position}, utility {token.utility:.3g}{gone}"
        classes = f"u{level}" if token.gone is None else f"u{level} e"
        spans.append(f'<span class="{classes}" title="{title}">{html.escape(token.text)}</span>')
    # A line break that directly follows the tag is no part of the text, so that one is put there.
    return f"<section>\n<h2>{html.escape(view.heading)}</h2>\n<pre>\n{''.join(spans)}</pre>\n</section>"


def in_colour(stream: TextIO) -> bool:
    """Whether to write colours to it: a terminal that knows them, of a user who wants them."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


_RAMP = (16, 17, 18, 54, 90, 126, 162, 198)
"""Background colours of the levels, of the 256 that terminals have: black to blue to red."""
assert len(_RAMP) == LEVELS


def terminal(view: View, colour: bool) -> str:
    """The text for a terminal; without colours with numbers in the place of what was evicted."""
    styled = [
        (None if token.gone is not None else level, token.text)
        for token, level in zip(view.tokens, view.levels, strict=True)
    ]
    parts = [view.heading, "\n"]
    for level, group in itertools.groupby(styled, key=lambda part: part[0] if colour else part[0] is None):
        texts = [text for _, text in group]
        if not colour:
            parts.append(f"[{len(texts)} evicted]" if level else "".join(texts))
            continue
        style = "\x1b[2;9m" if level is None else f"\x1b[97;48;5;{_RAMP[level]}m"
        parts.append("\n".join(f"{style}{line}\x1b[0m" for line in "".join(texts).split("\n")))
    return "".join(parts)
