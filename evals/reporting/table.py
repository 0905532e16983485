"""A table for a terminal and as Markdown, and numbers as tables have them (scores in percent).

The first column is aligned left, and on pages all columns of words; the others right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inertiakv.evals.statistics import Comparison, Estimate

Row = list[str]
_WORD = re.compile("[A-Za-z]{4}")


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    head: Row
    rows: list[Row]

    def text(self) -> str:
        return "\n".join([self.title, *aligned([self.head, *self.rows])])

    def markdown(self, level: int = 2) -> str:
        parts = [f"{'#' * level} {self.title}", self.note, markdown_table([self.head, *self.rows])]
        return "\n\n".join(part for part in parts if part)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    ]


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head."""
    columns = list(zip(*lines[1:], strict=True)) or [()] * len(lines[0])
    left = [not at or any(_WORD.search(cell) for cell in cells) for at, cells in enumerate(columns)]
    rule = ["---" if words else "---:" for words in left]
    cells = ([cell.replace("|", "\\|") or " " for cell in line] for line in (lines[0], rule, *lines[1:]))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def signed(value: float) -> str:
    text = f"{100 * value:+.1f}"
    return "0.0" if float(text) == 0 else text


def interval(of: Estimate | Comparison) -> str:
    form = percent if isinstance(of, Estimate) else signed
    return f"{form(of.low)} to {form(of.high)}"


def p_value(p: float) -> str:
    if math.isnan(p):
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def published(value: float | None) -> str:
    """A figure of the paper's, in percent already."""
    return "-" if value is None else f"{value:.2f}"


def task_name(task: str) -> str:
    """Without its benchmark."""
    return task.partition(":")[2] or task


def index_ranges(numbers: Sequence[int]) -> str:
    """`3, 17-24`: of ascending numbers."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def ordered(value: Any) -> tuple[bool, float, str]:
    """A key that sorts the values of an option: numbers first."""
    number = isinstance(value, (int, float))
    return not number, float(value) if number else 0.0, str(value)


def shown(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
