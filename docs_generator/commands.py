"""Describe every command of the command line, from the application that runs them."""

import os
import re
import textwrap
from typing import get_origin
from unittest.mock import patch

from cyclopts import App
from cyclopts.argument import Argument

from docs_generator.markdown import make_table
from lachesis.cli.main import GROUPS, build_app

COMMANDS_HEAD = """# Commands

For whoever types `lachesis`: what each command does, and all of its options.

`RUN` is the id of a run, the beginning of that id, a name (of several runs with one name, the
newest is meant), or `@last` for the newest run. Every command also takes `--help` and, but for
`completion`, `--json` to print JSON for a program. The exit status is 0 if the command did what it
was asked, 1 for an [error](errors.md), and 2 for a wrong command line.
"""
# Where a usage line is not folded.
_BLANK = "\0"


def render_commands() -> str:
    """Return the page of all commands, in the groups of `lachesis --help`."""
    # Defaults come from the environment.
    with patch.dict(os.environ):
        os.environ.pop("LACHESIS_PROFILE", None)
        app = build_app()
        sections = [
            "\n".join([f"## {title}", "", *(_render(app, *command) for command in commands)])
            for title, commands in GROUPS.items()
        ]
    return COMMANDS_HEAD + "\n" + "\n".join(sections)


def _render(app: App, words: str, _: str, text: str, example: str) -> str:
    command = app
    for word in words.split():
        command = command[word]
    arguments = [
        argument
        for argument in command.assemble_argument_collection(
            default_parameter=app.default_parameter
        )
        if argument.show and argument.name != "--json"
    ]
    usage = " ".join(["lachesis", words, *map(_format_usage, arguments)])
    usage = textwrap.fill(
        usage, 90, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    ).replace(_BLANK, " ")
    lines = [f"### {words}", "", text, "", "```text", usage, "```", ""]
    if arguments:
        lines += [make_table(("argument", "meaning"), list(map(_make_row, arguments))), ""]
    return "\n".join([*lines, f"Example: `{example}`", ""])


def _format_usage(argument: Argument) -> str:
    """Return how an argument is written in a usage line; what may be left out is in brackets."""
    value = _get_metavar(argument)
    if argument.index is None:
        text = f"{argument.name} {value}".rstrip()
    else:
        text = f"{value}..." if get_origin(argument.hint) is tuple else value
    text = text.replace(" ", _BLANK)
    return text if argument.required else f"[{text}]"


def _make_row(argument: Argument) -> tuple[str, str]:
    value = _get_metavar(argument)
    if argument.index is None:
        name = ", ".join(f"`{option} {value}`".replace(" `", "`") for option in argument.names)
    else:
        name = f"`{value}`"
    return name, re.sub(r"([<>])", r"\\\1", argument.parameter.help or "")


def _get_metavar(argument: Argument) -> str:
    """Return the word that stands for the value, or nothing for an option without a value."""
    if argument.hint is bool:
        return ""
    if argument.parameter.metavar:
        return argument.parameter.metavar
    if choices := argument.get_choices():
        return "{" + ",".join(choices) + "}"
    return argument.name.lstrip("-").replace("-", "_").upper()
