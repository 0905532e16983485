"""Traced runs as one HTML page that needs nothing else: text, sets over time, churn, and a slider over steps.

Shape letters: T steps, P positions, C columns of the picture.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch

from .runs import Run
from .template import TEMPLATE
from .text import LEVELS, Token, TracedText

MOST_RUNS = 12
MOST_TOKENS = 3000
"""Tokens of a text that are shown: those nearest to what is kept."""
MOST_COLUMNS, MOST_ROWS = 600, 200
"""Of a picture of sets; a cell may stand for several tokens and steps."""
SHARES = 9
"""What a cell of the picture may be: from 0, nothing kept, to this, everything."""
WIDTH, HEIGHT = 600, 120
"""Of the chart of churn, in units of its own."""

Series = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class TracedRun:
    """A policy's run with its real budget."""

    text: TracedText
    picture: list[str]
    """A row for each step, a character for each token or few: . where there is none yet, else the share that
    is kept, 0 to 9."""
    steps: int
    churn: Series
    """Of the same rule where every token is kept: the share of the top B that is new, by step."""


def traced_run(text: TracedText, run: Run, churn: Series) -> TracedRun:
    return TracedRun(text, picture(run), run.trace.steps, churn)


def picture(run: Run) -> list[str]:
    """What a run's cache held: positions from left to right, steps down."""
    steps, width = run.trace.utility_TP.shape
    rows, columns = (
        torch.linspace(0, steps - 1, min(MOST_ROWS, steps)).round().long(),
        min(MOST_COLUMNS, width),
    )
    there_TP = run.trace.newest_T.cpu()[rows, None] >= torch.arange(width)
    held_TP = run.cached_TP.cpu()[rows] & there_TP
    column_P = torch.arange(width) * columns // width

    def count(of_TP: torch.Tensor) -> torch.Tensor:
        zeros_TC = torch.zeros(len(rows), columns, dtype=torch.float64)
        return zeros_TC.index_add(1, column_P, of_TP.double())

    there_TC = count(there_TP)
    share_TC = (SHARES * count(held_TP) / there_TC).ceil().nan_to_num(-1).long()
    return ["".join("." if share < 0 else str(share) for share in row) for row in share_TC.tolist()]


def page(runs: Sequence[TracedRun]) -> str:
    """The page. Of many runs it shows the first ones, of a long text what is near to the kept tokens."""
    left = len(runs) - MOST_RUNS
    more = (
        f"<p>{left:,} more runs are not on this page: trace fewer prompts or policies.</p>"
        if left > 0
        else ""
    )
    shown = runs[:MOST_RUNS]
    sections = "\n".join(_section(number, run) for number, run in enumerate(shown))
    data = json.dumps([_data(run) for run in shown], separators=(",", ":"))
    scale = " ".join(f'<span class="l{i} k">{i + 1}</span>' for i in range(LEVELS))
    levels = "\n".join(_level(i) for i in range(LEVELS))
    parts = {"scale": scale, "sections": sections, "more": more, "data": data, "levels": levels}
    return re.sub("@([a-z_]+)@", lambda place: parts[place[1]], TEMPLATE)


def _level(level: int) -> str:
    places = f".l{level}, [data-colour=stayed] .s{level}, [data-colour=utility] .u{level}"
    return f"{places} {{ background: rgb(255 140 0 / {0.8 * level / (LEVELS - 1):.2f}) }}"


def _data(run: TracedRun) -> dict[str, Any]:
    """What the script needs; nothing of it is a text of the user's."""
    came, went = [0] * (run.steps + 1), [0] * (run.steps + 1)
    for token in run.text.tokens:
        came[token.since] += 1
        if token.gone is not None:
            went[token.gone] += 1
    total = list(accumulate(came))
    kept = [there - gone for there, gone in zip(total, accumulate(went), strict=True)]
    return {"steps": run.steps, "kept": kept, "total": total, "picture": run.picture}


def _section(number: int, run: TracedRun) -> str:
    heading, steps = html.escape(run.text.heading), run.steps
    return f"""\
<section data-run="{number}">
<h2>{heading}</h2>
<div class="bar"><label for="step{number}">Step</label>
<input id="step{number}" type="range" min="0" max="{steps}" value="{steps}" step="1">
<output for="step{number}">{steps} of {steps}</output></div>
{_text(run)}
<p class="about" aria-live="polite">Point at a token, or tap it, for its numbers.</p>
<h3>What the cache held</h3>
<canvas role="img" aria-label="Tokens from left to right, steps from top to bottom"></canvas>
<p class="small">Tokens from left to right, steps from top to bottom; the line is the step above.
Click to go to a step.</p>
{_churn(run)}
</section>"""


def _text(run: TracedRun) -> str:
    tokens, levels = run.text.tokens, run.text.levels
    shown, parts = nearest(tokens, MOST_TOKENS), []
    for inside, group in groupby(range(len(tokens)), key=lambda position: position in shown):
        positions = list(group)
        if inside:
            parts += [
                _span(position, tokens[position], levels[position], run.steps) for position in positions
            ]
        else:
            parts.append(f'<span class="cut">[{len(positions):,} tokens are not shown]</span>')
    # HTML drops a line break that directly follows <pre>: here it is this one, and not the text's.
    return f'<pre tabindex="0" aria-label="The text">\n{"".join(parts)}</pre>'


def _span(position: int, token: Token, level: int, steps: int) -> str:
    stayed = token.stayed(steps)
    about = f"position {position}: stayed {stayed} of {steps} steps, utility {token.utility:.3g}"
    about += f", evicted at step {token.gone}" if token.gone is not None else ""
    gone = "" if token.gone is None else f' data-gone="{token.gone}"'
    since = f' data-since="{token.since}"' if token.since else ""
    classes = f"u{level} s{(LEVELS - 1) * stayed // steps}" + " e" * (token.gone is not None)
    return f'<span class="{classes}"{since}{gone} title="{about}">{html.escape(token.text)}</span>'


def nearest(tokens: Sequence[Token], most: int) -> set[int]:
    """The positions of so many tokens: those nearest to one that is kept, or to the end where none is."""
    kept = [token.gone is None for token in tokens]
    kept[-1] |= not any(kept)
    distances = [math.inf] * len(tokens)
    for order in (range(len(tokens)), range(len(tokens) - 1, -1, -1)):
        distance = math.inf
        for position in order:
            distance = 0 if kept[position] else distance + 1
            distances[position] = min(distances[position], distance)
    return set(sorted(range(len(tokens)), key=lambda position: distances[position])[:most])


def _churn(run: TracedRun) -> str:
    """A chart of lines."""
    lines = {name: line for name, line in run.churn.items() if line["step"]}
    top = max((share for line in lines.values() for share in line["churn"]), default=0) or 1
    drawn = "".join(
        f'<polyline class="{name}" points="{" ".join(_points(line, run.steps, top))}"/>'
        for name, line in lines.items()
    )
    return f"""\
<h3>How much of the set is new at each step</h3>
<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img"
 aria-label="Share of the set that is new, by step">{drawn}</svg>
<p class="small">The top is {100 * top:.1f} % of the set.
<span class="raw">Thin</span>: by the step's own scores.
<span class="ema">Thick</span>: by utility, by which tokens are chosen.
All tokens were kept for this, so that one may come back; in a cache that evicts none does.</p>"""


def _points(line: dict[str, list[float]], steps: int, top: float) -> Iterator[str]:
    for step, share in zip(line["step"], line["churn"], strict=True):
        yield f"{WIDTH * step / steps:.1f},{(HEIGHT - 4) * (1 - share / top) + 2:.1f}"
