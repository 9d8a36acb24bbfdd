"""Declare arguments that several commands have."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from lachesis.base.argparse_types import NUM_STEPS, SEED
from lachesis.config.installation_settings import is_env_flag_set

DEFAULT_PROFILE = os.environ.get("LACHESIS_PROFILE", "embedded")
ENVIRONMENT_HELP = "a name from `lachesis envs`, a file, or a launch file RUN.yaml"
MODEL_HELP = (
    "base model: a Hugging Face name, a folder or tiny (default: a tiny model that was pretrained "
    "on the environment)"
)
CHECKPOINT_HELP = "last (default), best (by held-out result, else by mean reward), or a step"
RUN_HELP = "the run: its id, a beginning of it, its name (the newest run of it), or @last"
# Adds a command: its name, its help text, and an example.
AddCommand = Callable[..., argparse.ArgumentParser]


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the argument that names a run."""
    command.add_argument("run", help=RUN_HELP)


def add_runs(command: argparse.ArgumentParser, *, minimum: int) -> None:
    """Add the argument that names several runs."""
    nargs = "+" if minimum == 1 else "*"
    command.add_argument("runs", nargs=nargs, metavar="RUN", help=RUN_HELP)


def add_profile_option(command: argparse.ArgumentParser) -> None:
    """Add the option that says where training happens."""
    command.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        help="embedded, tinker or custom (default: %(default)s)",
    )


def add_launch_options(
    command: argparse.ArgumentParser, profile_default: str = DEFAULT_PROFILE
) -> None:
    """Add the options that say what is trained and how.

    Args:
        command: Parser of the command.
        profile_default: What the help says about the profile that is used without the option.
    """
    add_edit_options(command)
    command.add_argument(
        "--profile",
        help=f"embedded, tinker or custom (default: {profile_default})",
    )
    command.add_argument(
        "--steps", type=NUM_STEPS, help="training steps (default: the profile's number)"
    )
    command.add_argument("--model", help=MODEL_HELP)
    command.add_argument("--name", help="a name for the run, which lists and its page show")
    command.add_argument("--note", help="what you want to remember about the run")
    command.add_argument(
        "--tag", action="append", default=[], help="a word to find the run by; may be repeated"
    )
    command.add_argument(
        "--seed", type=SEED, help="seed of the adapter and, on the embedded profile, of sampling"
    )
    validation = command.add_mutually_exclusive_group()
    validation.add_argument(
        "--require-validation",
        action="store_true",
        help="refuse unless a recent `lachesis test` found the environment learnable (the default "
        "on paid profiles)",
    )
    validation.add_argument(
        "--without-validation",
        action="store_true",
        help="on a paid profile, do not require such a test",
    )


def add_yes_option(command: argparse.ArgumentParser) -> None:
    """Add the option that agrees to what a run costs."""
    command.add_argument(
        "--yes",
        action="store_true",
        help="on a paid profile, start without asking (a limit of limits.max_cost_usd does so too)",
    )


def add_edit_options(command: argparse.ArgumentParser, metavar: str = "FIELD=VALUE") -> None:
    """Add the option that sets fields of the configuration."""
    command.add_argument(
        "--set", action="append", default=[], metavar=metavar, dest="edits", help="may be repeated"
    )


def add_watch_option(command: argparse.ArgumentParser) -> None:
    """Add the option that shows the progress."""
    command.add_argument(
        "--watch",
        action="store_true",
        help="show progress until the run ends; Ctrl-C leaves it running",
    )


def add_serve_option(command: argparse.ArgumentParser) -> None:
    """Add the option that starts no server."""
    command.add_argument(
        "--no-serve",
        action="store_true",
        default=is_env_flag_set("LACHESIS_NO_SERVE"),
        help="fail if no Prefect server runs here, instead of starting one in the background; "
        "also $LACHESIS_NO_SERVE=1",
    )
