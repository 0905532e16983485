"""A table: for a terminal, as Markdown and as HTML. The first column is to the left, the others right."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

Row = list[str]


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
        lines = "\n".join([_html_row(self.head, "th"), *(_html_row(row, "td") for row in self.rows)])
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
    rule = ["---"] + ["---:"] * (len(lines[0]) - 1)
    cells = ([cell.replace("|", "\\|") or " " for cell in line] for line in (lines[0], rule, *lines[1:]))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "".join(["<tr>", *(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells), "</tr>"])
