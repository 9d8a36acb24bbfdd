"""Describe every command of the command line, from its parser."""

from __future__ import annotations

import argparse
import os
import re
from unittest.mock import patch

from docs_generator.markdown import make_table
from lachesis.cli.main import build_parser
from lachesis.cli.parser import CommandParser, TopParser

COMMANDS_HEAD = """# Commands

For whoever types `lachesis`: what each command does, and all of its options.

`RUN` is the id of a run, a beginning of it or a name that no other run has, or `@last` for the
newest. Every command also takes `--help`, and `--json` to print JSON for a program. The exit status
is 0 if the command did what it was asked, 1 for an [error](errors.md), and 2 for a wrong command
line.
"""


def render_commands() -> str:
    """Return the page of all commands, in the groups of `lachesis --help`."""
    # Usage lines are folded at the width of a terminal, and defaults come from the environment.
    with patch.dict(os.environ, {"COLUMNS": "90"}):
        parser = build_parser()
        sections = [
            "\n".join(
                [f"## {title.capitalize()}", "", *(_render(parser, name) for name in commands)]
            )
            for title, commands in parser.groups.items()
        ]
    return COMMANDS_HEAD + "\n" + "\n".join(sections)


def _render(parser: TopParser, name: str) -> str:
    command = parser.commands[name]
    lines = [f"### {name}", "", f"{_make_sentence(parser, name)}", ""]
    lines += ["```text", command.format_usage().removeprefix("usage: ").rstrip(), "```", ""]
    lines += _list_arguments(command)
    for action, text, subcommand in _list_subcommands(command):
        lines += [f"`lachesis {name} {action}`: {text}.", "", *_list_arguments(subcommand)]
    if command.epilog:
        example = command.epilog.removeprefix("example: ")
        lines += [f"Example: `{example}`", ""]
    return "\n".join(lines)


def _list_arguments(command: CommandParser) -> list[str]:
    """Return the table of a command's own arguments, or nothing if it has none."""
    rows = [_make_row(command, action) for action in command.list_actions() if _is_own(action)]
    return [make_table(("argument", "meaning"), rows), ""] if rows else []


def _list_subcommands(command: CommandParser) -> list[tuple[str, str, CommandParser]]:
    """Return the name, the help and the parser of those below a command, such as `env new`."""
    return [
        (choice.dest, choice.help or "", action.choices[choice.dest])
        for action in command.list_actions()
        if isinstance(action, argparse._SubParsersAction)
        for choice in action._choices_actions
    ]


def _make_sentence(parser: TopParser, name: str) -> str:
    text = next(commands[name] for commands in parser.groups.values() if name in commands)
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _is_own(action: argparse.Action) -> bool:
    is_subcommand = isinstance(action, argparse._SubParsersAction)
    return action.dest not in ("help", "json") and not is_subcommand


def _make_row(command: CommandParser, action: argparse.Action) -> tuple[str, str]:
    if action.option_strings:
        value = "" if action.nargs == 0 else f" {_get_metavar(action)}"
        name = ", ".join(f"`{option}{value}`" for option in action.option_strings)
    else:
        name = f"`{_get_metavar(action)}`"
    text = action.help or ""
    if "%" in text:
        text = text % {**vars(action), "prog": command.prog}
    return name, re.sub(r"([<>])", r"\\\1", text)


def _get_metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()
