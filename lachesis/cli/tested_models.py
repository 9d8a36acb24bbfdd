"""Say which models a test compares, and how to train what was tested."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from lachesis.validation.inference_tests import EMBEDDED


def find_trained_model(args: argparse.Namespace) -> str | None:
    """Return what `train --model` would be for a test: the model of its only --model on this
    machine, or None.
    """
    names = [_expand_model_path(name) for name in args.model or []]
    return names[0] if len(names) == 1 and args.profile == "embedded" else None


def list_tested_models(args: argparse.Namespace) -> list[str] | None:
    """Return the models of a test as the service names them, or None for the default."""
    names = [
        f"{EMBEDDED}{_expand_model_path(name)}" if _is_local_model(args, name) else name
        for name in args.model or []
    ]
    return [*names, *(args.endpoint_model or [])] or None


def _is_local_model(args: argparse.Namespace, name: str) -> bool:
    """Return whether the engine of this machine serves the model of a test's --model."""
    return args.profile == "embedded" or name.startswith(EMBEDDED) or Path(name).is_dir()


def _expand_model_path(name: str) -> str:
    """Return the model's name, or the whole path of its folder."""
    name = name.removeprefix(EMBEDDED)
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def format_train_command(args: argparse.Namespace) -> str:
    """For what was tested, as it was given."""
    model_name = find_trained_model(args)
    model_options = ["--model", model_name] if model_name else []
    edit_options = [part for text in args.edits for part in ("--set", text)]
    profile_options = (
        ["--profile", args.profile]
        if args.profile != os.environ.get("LACHESIS_PROFILE", "embedded")
        else []
    )
    return shlex.join(
        [
            "lachesis",
            "train",
            args.environment,
            *profile_options,
            *model_options,
            *edit_options,
            "--require-validation",
            "--watch",
        ]
    )
