"""Print for a terminal: sentences, tables, bars, sparklines, and answers as text or JSON."""

import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from lachesis.base.formatting import format_duration, show_controls
from lachesis.cli.options import Output


class SafeConsole(Console):
    """A console on which texts of others, such as errors of environments, control nothing."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the parts of a view, with visible control characters."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=show_controls(segment.text))


console = SafeConsole(
    highlight=False,
    emoji=False,
    markup=False,
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140,
)

stderr_console = SafeConsole(
    stderr=True, highlight=False, emoji=False, markup=False, soft_wrap=True
)

# A time of a record inside a sentence.
UTC_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(?:\.\d+)?\+00:00")

_BLOCKS = "▁▂▃▄▅▆▇█"

STATUS_STYLES = {"completed": "green", "failed": "red", "stopped": "yellow"}

# Colours of the tones of a verdict; see `lachesis.reporting.verdict_marks`.
TONE_STYLES = {"good": "green", "warn": "yellow", "bad": "red", "none": ""}


def print_answer(options: Output, answer: object, view: object) -> None:
    """Print JSON for a program, or else `view` for a person."""
    if options.json:
        print(json.dumps(answer, indent=2, default=str))
    elif isinstance(view, str):
        print_sentence(view)
    else:
        # Lines that hold a path or a command may be longer than the terminal is wide; the terminal
        # shows the rest below, and copies it as one line.
        console.print(view, crop=False)


def print_sentence(sentence: str | Text, output: Console | None = None) -> None:
    """Print a sentence to stdout or `output`, on a terminal with line breaks between words only."""
    output = output or console
    text = Text(sentence) if isinstance(sentence, str) else sentence
    for line in wrap_between_words(text, output.width) if output.is_terminal else [text]:
        output.print(line, soft_wrap=True)


def print_note(text: str) -> None:
    """Print a note for a person to stderr; programs read stdout."""
    print_sentence(Text(text, style="dim"), stderr_console)


def draw_sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """Draw values as block characters, from 0 to 1 or else from the least to the greatest.

    More than `width` values are averaged. Where all values are missing there is a blank.
    """
    present_values = [value for value in values if value is not None]
    if not present_values:
        return ""
    low, high = min(present_values), max(present_values)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    num_blocks = min(width, len(values))
    bounds = [round(index * len(values) / num_blocks) for index in range(num_blocks + 1)]
    text = ""
    for start, end in itertools.pairwise(bounds):
        part = [value for value in values[start:end] if value is not None]
        if not part:
            text += " "
            continue
        share = (sum(part) / len(part) - low) / ((high - low) or 1.0)
        text += _BLOCKS[min(7, int(share * 8))]
    return text


@contextlib.contextmanager
def show_progress_bar(text: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, which stays hidden until the first step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=stderr_console, disable=quiet)
    task = progress.add_task(text, total=None, visible=False)

    def advance(done: int, total: int) -> None:
        if not progress.live.is_started:
            progress.start()
        progress.update(task, completed=done, total=total, visible=True)

    try:
        yield advance
    finally:
        progress.stop()


def style_status(status: str) -> Text:
    """Return a status in the colour that tells whether it is good."""
    return Text(status, style=STATUS_STYLES.get(status, "cyan"))


def format_eta(seconds: float | None) -> str:
    """Return the remaining time as the end of a sentence, or nothing if it is not known."""
    if seconds is None:
        return ""
    return f", about {format_duration(seconds)} left"


def format_local_time(iso_time: str) -> str:
    """Return a time in the time zone of the reader, to the minute."""
    return datetime.fromisoformat(iso_time).astimezone().strftime("%Y-%m-%d %H:%M")


def localize_times(text: str) -> str:
    """Convert the UTC times in a string to the reader's time zone."""
    return UTC_TIME.sub(lambda found: format_local_time(found.group()), text)


def shorten_middle(text: str, max_length: int) -> str:
    """Shorten a string to at most `max_length` characters, with an ellipsis in its middle."""
    if len(text) <= max_length:
        return text
    tail = (max_length - 1) // 2
    return f"{text[: max_length - 1 - tail]}…{text[len(text) - tail :]}"


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
    """Return a renderable that prints a string as a single line of any length."""
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
    """Split a string into lines, broken at blanks outside of commands in backticks.

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
