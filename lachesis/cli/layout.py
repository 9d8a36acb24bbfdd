"""Lay out names and values for a terminal, without breaking a path, an address or a command.

A terminal shows a line that is too long on the next one, and copies it as one; a line that was
broken here could not be copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

# A command in backticks, or a word, with the blanks before it.
_PIECE = re.compile(r" *(?:[(\[]?`[^`\n]*`[^\s`]*|[^ \n]+)")
# Values begin at most here; a longer name has its value on the next line.
MAX_NAME_WIDTH = 34


class Pairs:
    """Show a name and a value per line; values are wrapped between words only."""

    def __init__(self, rows: Sequence[tuple[Text, Text]]) -> None:
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.rows:
            return
        name_width = min(MAX_NAME_WIDTH, max(name.cell_len for name, _ in self.rows))
        indent = " " * (name_width + 2)
        for name, value in self.rows:
            lines = wrap_between_words(value, options.max_width - len(indent))
            if name.cell_len > name_width:
                yield _make_line(name)
                head = Text(indent)
            else:
                head = Text.assemble(name, " " * (len(indent) - name.cell_len))
            for line in lines:
                # A sum of two texts would have the style of the first one.
                yield _make_line(Text.assemble(head, line))
                head = Text(indent)


def _make_line(text: Text) -> Text:
    """Return a text that is printed as one line, however long it is."""
    text.no_wrap, text.overflow = True, "ignore"
    text.rstrip()
    return text


def make_pairs_table(rows: Iterable[tuple[str | Text, Any]]) -> RenderableType:
    """Return a view with a name and a value per line; empty values are left out."""
    shown = [(name, value) for name, value in rows if value not in (None, "", {}, [])]
    return Pairs(
        [
            (
                name if isinstance(name, Text) else Text(name, style="bold"),
                value if isinstance(value, Text) else Text(str(value)),
            )
            for name, value in shown
        ]
    )


def wrap_between_words(text: Text, width: int) -> list[Text]:
    """Return the lines of a text, broken at blanks outside of commands in backticks.

    A word that is wider than `width` has a line of its own.
    """
    lines = []
    for paragraph in text.split("\n", allow_blank=True):
        start, end = 0, 0
        for piece in _PIECE.finditer(paragraph.plain):
            is_first = start == end
            if not is_first and paragraph[start : piece.end()].cell_len > width:
                lines.append(paragraph[start:end])
                # The blanks before the word are those where the line is broken.
                start = piece.end() - len(piece.group().lstrip(" "))
            end = piece.end()
        lines.append(paragraph[start:end])
    return lines


def make_lines(rows: Sequence[Sequence[str]], style: str = "") -> list[Text]:
    """Return one line per row, with columns of equal width; the last one ends with an ellipsis."""
    if not rows:
        return []
    rows = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)]
        line = Text("  ".join([*cells, row[-1]]), style=style, no_wrap=True, overflow="ellipsis")
        lines.append(line)
    return lines
