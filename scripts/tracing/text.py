"""A text with its tokens coloured by utility and the evicted ones struck out: as a page, in a terminal."""

from __future__ import annotations

import html
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from inertiakv import TextStream

from .runs import Run

LEVELS = 8
_RAMP = (16, 17, 18, 54, 90, 126, 162, 198)
"""Background colours of the levels, of the 256 that terminals have: black to blue to red."""
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Pictures of control characters, which must not reach a terminal or a page."""
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
<p>A token's colour is the rank of its utility, the last one it had: {scale}.
<span class="e">Struck out</span> is what was evicted. Point at a token for its numbers.</p>
{sections}
</html>
"""


@dataclass(frozen=True)
class Token:
    text: str
    utility: float
    """The last one that it had; NaN where it went before the first step."""
    gone: int | None
    """The step, from 1, at which it was evicted, 0 for before that. None for a token that is kept."""


@dataclass(frozen=True)
class TracedText:
    """A prompt and its answer, and what a run kept of them at its end."""

    title: str
    tokens: list[Token]

    @property
    def levels(self) -> list[int]:
        """The level of each token by the rank of its utility, all of the same size; equals share one."""
        utilities = [-math.inf if math.isnan(token.utility) else token.utility for token in self.tokens]
        rank = {utility: i for i, utility in enumerate(sorted(utilities))}
        return [LEVELS * rank[utility] // len(utilities) for utility in utilities]

    @property
    def heading(self) -> str:
        kept = sum(token.gone is None for token in self.tokens)
        return f"{self.title}: {kept:,} of {len(self.tokens):,} tokens are kept"


def traced_text(title: str, tokenizer: Any, prompt: Sequence[int], run: Run) -> TracedText:
    """Of a run that evicts."""
    utility_TP, kept_P = run.trace.utility_TP, run.cached_TP[-1]
    step_T1 = torch.arange(1, run.trace.steps + 1)[:, None]
    last_P = (run.trace.present_TP * step_T1).amax(0)  # from 1; 0 for a token that no step saw
    utilities = utility_TP[last_P - 1, torch.arange(len(last_P))].tolist()
    gone = [None if kept else last for kept, last in zip(kept_P.tolist(), last_P.tolist(), strict=True)]
    texts = pieces(tokenizer, [*prompt, *run.tokens[: run.trace.steps]])
    return TracedText(title, [Token(*token) for token in zip(texts, utilities, gone, strict=True)])


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


def page(traced: Sequence[TracedText]) -> str:
    """A self-contained HTML page."""
    levels = "\n".join(
        f".u{i} {{ background: rgb(255 150 0 / {0.75 * i / (LEVELS - 1):.2f}) }}" for i in range(LEVELS)
    )
    scale = " ".join(f'<span class="u{i}">{i + 1}</span>' for i in range(LEVELS))
    sections = "\n".join(map(_section, traced))
    return _PAGE.format(levels=levels, scale=scale, sections=sections)


def _section(traced: TracedText) -> str:
    spans = []
    for position, (token, level) in enumerate(zip(traced.tokens, traced.levels, strict=True)):
        evicted = token.gone is not None
        title = f"position {position}, utility {token.utility:.3g}"
        title += f", evicted at step {token.gone}" if evicted else ""
        classes = f"u{level} e" if evicted else f"u{level}"
        spans.append(f'<span class="{classes}" title="{title}">{html.escape(token.text)}</span>')
    # HTML drops a line break that directly follows <pre>: here it is this one, and not the text's.
    return f"<section>\n<h2>{html.escape(traced.heading)}</h2>\n<pre>\n{''.join(spans)}</pre>\n</section>"


def in_colour(stream: TextIO) -> bool:
    """Whether to write colours to it: a terminal that knows them, of a user who wants them."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal(traced: TracedText, colour: bool) -> str:
    """The text for a terminal; without colours, with a count in the place of what was evicted."""
    styled = [
        (level if token.gone is None else None, token.text)
        for token, level in zip(traced.tokens, traced.levels, strict=True)
    ]
    parts = [traced.heading, "\n"]
    for key, group in itertools.groupby(styled, key=lambda part: part[0] if colour else part[0] is None):
        texts = [text for _, text in group]
        if colour:
            style = "\x1b[2;9m" if key is None else f"\x1b[97;48;5;{_RAMP[key]}m"
            parts.append("\n".join(f"{style}{line}\x1b[0m" for line in "".join(texts).split("\n")))
        else:
            parts.append(f"[{len(texts)} evicted]" if key else "".join(texts))
    return "".join(parts)
