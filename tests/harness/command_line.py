"""Run command lines of `lachesis` in the test's process, or read them only."""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from lachesis.cli.main import build_app, main


def parse_command(words: Sequence[str]) -> SimpleNamespace:
    """Return the command of the words as `command`, and what its function is given, by name.

    Words that name a run or a checkpoint are taken as they are.

    Raises:
        CycloptsError: The command line does not take the words.
    """
    app = build_app()
    command, *_ = app.parse_commands(words)
    with (
        patch("lachesis.runs.names_and_tags.resolve_run_id", lambda store, word: word),
        patch("lachesis.runs.names_and_tags.resolve_checkpoint_name", lambda store, word: word),
    ):
        _, bound, *_ = app.parse_args(words)
    bound.apply_defaults()
    values = dict(bound.arguments)
    options = values.pop("options", None)
    if is_dataclass(options):
        values = {field.name: getattr(options, field.name) for field in fields(options)} | values
    return SimpleNamespace(command=" ".join(command), **values)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command and return what it prints, or its error where a code is expected."""

    def run_command(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(list(words)) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return run_command


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command with `--json` and return its answer."""

    def run_command(*words: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([*words, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return run_command
