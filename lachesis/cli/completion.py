"""Complete words of the command line in a shell: commands, options, runs, environments, fields.

argcomplete calls the program with what was typed so far, and prints the words that could follow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from lachesis.cli.parser import TopParser

MAX_RUNS = 50
Completer = Callable[..., Iterable[str]]


def complete_words(parser: TopParser) -> None:
    """Print the words that could follow, and end the process.

    Outside of a completion nothing happens.
    """
    import argcomplete

    for command in parser.commands.values():
        for action in command.list_actions():
            completer = _find_completer(action)
            if completer is not None:
                action.completer = completer  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options="long")


def handle_completion(args: argparse.Namespace) -> None:
    """Print the code that makes a shell complete the words of `lachesis`."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["lachesis"], shell=args.shell))


def _find_completer(action: argparse.Action) -> Completer | None:
    """Return what lists the values of an argument, or None if nothing does."""
    return {
        "run": _list_runs,
        "runs": _list_runs,
        "like": _list_runs,
        "start_from": _list_runs,
        "environment": _list_environments,
        "environments": _list_environments,
        "others": _list_environments,
        "name": _list_environments if not action.option_strings else None,
        "edits": _list_fields,
        "profile": _list_profiles,
    }.get(action.dest)


def _list_runs(prefix: str, **_: object) -> list[str]:
    from lachesis.runs.store import RunStore

    run_ids = [record.run_id for record in RunStore().all()]
    return [run_id for run_id in ("@last", *run_ids) if run_id.startswith(prefix)][:MAX_RUNS]


def _list_environments(prefix: str, **_: object) -> list[str]:
    from lachesis.environment_catalog.scan import scan_environments

    names = [environment.name for environment in scan_environments().environments]
    pattern = f"{prefix}*" if not prefix.endswith("/") else f"{prefix}*.py"
    files = [str(file) for file in Path().glob(pattern) if file.suffix in (".py", ".yaml", ".yml")]
    return [name for name in (*names, *sorted(files)) if name.startswith(prefix)]


def _list_fields(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the fields that can be set, each with the sign that its value follows."""
    from lachesis.config.field_edits import ConfigFields
    from lachesis.environment_catalog.lookup import (
        find_environment,
        load_schema,
        register_environment,
    )

    # The environment's own fields are known once it was typed.
    schema = None
    environment = getattr(parsed_args, "environment", None)
    if environment and not environment.endswith((".yaml", ".yml")):
        schema = load_schema(find_environment(register_environment(environment)))
    profile = getattr(parsed_args, "profile", None) or "embedded"
    fields = ConfigFields(profile, schema, is_owner=True).by_name.values()
    names = [f"{field.name}=" for field in fields if field.lock_reason is None]
    return sorted(name for name in names if name.startswith(prefix))


def _list_profiles(prefix: str, **_: object) -> list[str]:
    from lachesis.config.profiles import PROFILES

    return [name for name in PROFILES if name.startswith(prefix)]
