"""Accept commands by their old names, and print warnings about old names as notes."""

from __future__ import annotations

import sys
import warnings
from typing import TextIO

from lachesis.base.renamed import RenamedWarning, warn_renamed

RENAMED_COMMANDS = {"notices": "notifications"}


def replace_old_command(words: list[str]) -> list[str]:
    """Return the words of the command line with the present name of a renamed command."""
    if not words or words[0] not in RENAMED_COMMANDS:
        return words
    new_name = RENAMED_COMMANDS[words[0]]
    warn_renamed(f"lachesis {words[0]}", f"lachesis {new_name}")
    return [new_name, *words[1:]]


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning about an old name as a sentence, and others as Python does."""
    # The file and line that Python prints are of no use to somebody who typed a command.
    if issubclass(category, RenamedWarning):
        print(f"note: {message}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno), file=sys.stderr, end="")
