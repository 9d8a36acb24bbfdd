"""Determine which models a test compares, and the command that trains what was tested."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from lachesis.inference_tests.store import EMBEDDED, TINKER, get_model_name


def find_trained_model(args: argparse.Namespace) -> str | None:
    """Return the value of `train --model` that corresponds to a test's only --model, or None."""
    names = [_expand_model_path(name) for name in args.model or []]
    if len(names) == 1 and _is_trainable(args, args.model[0]):
        return names[0]
    return None


def list_tested_models(args: argparse.Namespace) -> list[str] | None:
    """Return the models of a test as the service names them, or None for the default."""
    names = [f"{_find_place(args, name)}{_expand_model_path(name)}" for name in args.model or []]
    return [*names, *(args.endpoint_model or [])] or None


def _is_local_model(args: argparse.Namespace, name: str) -> bool:
    """Return whether the embedded engine serves the model of a test's --model."""
    return args.profile == "embedded" or name.startswith(EMBEDDED) or Path(name).is_dir()


def _find_place(args: argparse.Namespace, name: str) -> str:
    """Return the prefix that says where a test's --model is sampled."""
    if _is_local_model(args, name):
        return EMBEDDED
    return TINKER


def _is_trainable(args: argparse.Namespace, name: str) -> bool:
    """Return whether the profile trains the model where the test samples it."""
    return args.profile == "embedded" or not _is_local_model(args, name)


def _expand_model_path(name: str) -> str:
    """Return the absolute path of a model folder; any other name is returned unchanged."""
    name = get_model_name(name)
    if Path(name).is_dir():
        return str(Path(name).resolve())
    return name


def _expand_environment_path(name: str) -> str:
    """Return the absolute path of a file; any other name is returned unchanged."""
    if Path(name).is_file():
        return str(Path(name).resolve())
    return name


def format_train_command(args: argparse.Namespace) -> str:
    """Return the command that trains what was tested, with the same options, in any folder."""
    model_name = find_trained_model(args)
    model_options = ["--model", model_name] if model_name else []
    edit_options = [part for text in args.edits for part in ("--set", text)]
    profile_options = ["--profile", args.profile] if args.profile != "embedded" else []
    return shlex.join(
        [
            "lachesis",
            "train",
            _expand_environment_path(args.environment),
            *profile_options,
            *model_options,
            *edit_options,
            *_list_validation_options(args),
            "--watch",
        ]
    )


def _list_validation_options(args: argparse.Namespace) -> list[str]:
    """Return the option that requires the test, which paid profiles require in any case."""
    if args.profile == "embedded":
        return ["--require-validation"]
    return []
