"""A table: for a terminal, as Markdown and as HTML. The first column is to the left, and on pages all columns
of words; the others are to the right."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

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

    def html(self, level: int = 2) -> str:
        note = f"<p>{html.escape(self.note)}</p>\n" if self.note else ""
        left = _of_words([self.head, *self.rows])
        rows = (_html_row(row, "td", left) for row in self.rows)
        lines = "\n".join([_html_row(self.head, "th", left), *rows])
        title = f"<h{level}>{html.escape(self.title)}</h{level}>\n"
        return f'{title}{note}<div class="table"><table>\n{lines}\n</table></div>'


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    ]


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head."""
    rule = ["---" if left else "---:" for left in _of_words(lines)]
    cells = ([cell.replace("|", "\\|") or " " for cell in line] for line in (lines[0], rule, *lines[1:]))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _of_words(lines: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns are to the left: the first one, and those with words below their heads."""
    columns = list(zip(*lines[1:], strict=True)) or [()] * len(lines[0])
    return [not at or any(_WORD.search(cell) for cell in cells) for at, cells in enumerate(columns)]


def _html_row(cells: Sequence[str], tag: str, left: Sequence[bool]) -> str:
    marks = [" class=left" if is_left else "" for is_left in left]
    inner = (f"<{tag}{mark}>{html.escape(cell)}</{tag}>" for cell, mark in zip(cells, marks, strict=True))
    return "".join(["<tr>", *inner, "</tr>"])
