"""Read command lines of `lachesis` without running them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from unittest.mock import patch

from lachesis.cli.main import build_app


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
