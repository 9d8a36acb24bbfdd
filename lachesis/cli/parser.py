"""Parse the words of the command line, and answer mistakes with the nearest right word.

The parser knows the names, options and help of all commands and loads none of them, so that
`lachesis --help` is there at once.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from lachesis import __version__
from lachesis.base.formatting import suggest

DESCRIPTION = (
    "Train language models with reinforcement learning: find environments, launch, watch and stop "
    "runs, export weights."
)
EPILOG = (
    "Start with `lachesis demo`, or with `lachesis train arithmetic --watch`. "
    "`lachesis COMMAND --help` describes one command. All files are kept under $LACHESIS_HOME."
)
# Columns of the help, at most; wider lines are hard to read.
MAX_WIDTH = 100


class UsageError(Exception):
    """The command line is wrong; `usage` is the usage of the command."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


class CommandParser(argparse.ArgumentParser):
    """Parse one command, and raise UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError whose message names the nearest word that is allowed.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{self.prog}: {message}", self.format_usage())

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Refuse a word that is not one of the choices of `action`."""
        choices = [str(choice) for choice in action.choices or ()]
        if not choices or str(value) in choices:
            return
        shown = f"allowed: {', '.join(choices)}"
        if len(choices) > 12:
            shown = f"`{self.prog} --help` lists what is allowed"
        suggestion = suggest(str(value), choices)
        raise argparse.ArgumentError(action, f"{value!r} is not known{suggestion}; {shown}")

    def list_actions(self) -> list[argparse.Action]:
        """Return the arguments and options of this command."""
        return list(self._actions)

    def list_options(self) -> list[str]:
        """Return the long options of this command."""
        return [
            option
            for action in self._actions
            for option in action.option_strings
            if option.startswith("--")
        ]


class TopParser(CommandParser):
    """Parse the whole command line; its help lists the commands in groups."""

    def __init__(self) -> None:
        super().__init__(prog="lachesis", description=DESCRIPTION, add_help=True)
        self.add_argument("--version", action="version", version=f"lachesis {__version__}")
        self.groups: dict[str, dict[str, str]] = {}
        self.commands: dict[str, CommandParser] = {}
        self._common = CommandParser(add_help=False)
        self._common.add_argument("--json", action="store_true", help="print JSON for a program")
        self._subparsers_action = self.add_subparsers(
            dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
        )

    def add_group(self, title: str) -> None:
        """Begin a group of commands in the help."""
        self.groups[title] = {}

    def add_command(self, name: str, text: str, example: str | None = None) -> CommandParser:
        """Add a command to the newest group.

        Args:
            name: The word that is typed.
            text: What it does, as a sentence.
            example: A command line that its help shows.

        Returns:
            Its parser, for its own arguments.
        """
        self.groups[next(reversed(self.groups))][name] = text
        command: CommandParser = self._subparsers_action.add_parser(
            name,
            help=text,
            description=text,
            parents=[self._common],
            epilog=f"example: {example}" if example else None,
        )
        self.commands[name] = command
        return command

    def parse_command_line(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments.

        Raises:
            UsageError: A word is not known, is missing, or has a value that is not allowed.
        """
        # The top parser would refuse unknown options without knowing those of the command.
        args, unknown_words = self.parse_known_args(list(words))
        if unknown_words:
            command = self.commands[args.command]
            word = unknown_words[0]
            suggestion = suggest(word.split("=")[0], command.list_options())
            command.error(f"unrecognized arguments: {' '.join(unknown_words)}{suggestion}")
        return args

    def format_help(self) -> str:
        """Return the description, the commands in their groups, and where to begin."""
        width = min(MAX_WIDTH, shutil.get_terminal_size().columns)
        name_width = max(len(name) for group in self.groups.values() for name in group)
        lines = ["usage: lachesis COMMAND ...", "", textwrap.fill(DESCRIPTION, width)]
        for title, commands in self.groups.items():
            lines += ["", f"{title}:"]
            for name, text in commands.items():
                lines += _format_entry(name, text, name_width, width)
        lines += ["", "options:"]
        for name, text in (("-h, --help", "show this help"), ("--version", "show the version")):
            lines += _format_entry(name, text, name_width, width)
        lines += ["", textwrap.fill(EPILOG, width, break_on_hyphens=False)]
        return "\n".join(lines) + "\n"


def _format_entry(name: str, text: str, name_width: int, width: int) -> list[str]:
    indent = " " * (name_width + 4)
    return textwrap.wrap(
        text,
        max(40, width),
        initial_indent=f"  {name:{name_width}}  ",
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
