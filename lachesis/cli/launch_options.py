"""Read the options of the commands that describe a launch: train and config."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from lachesis.base.errors import ArgumentsError
from lachesis.cli.options.common import DEFAULT_PROFILE
from lachesis.config.field_edits import parse_assignment
from lachesis.config.value_parsing import read_untyped
from lachesis.environment_catalog.lookup import register_environment
from lachesis.launch.choose_model import LaunchRequest
from lachesis.launch.launch_file import make_similar_request, read_launch_file
from lachesis.operations.service import LachesisService
from lachesis.runs.names_and_tags import check_name, check_note, check_tags

LAUNCH_FILE_ENDINGS = (".yaml", ".yml")


def read_launch_request(args: argparse.Namespace, service: LachesisService) -> LaunchRequest:
    """Return the launch that the options describe, with the rights of the owner.

    Options have priority over a launch file and over the run of `--like`.

    Raises:
        ArgumentsError: Nothing says what to train on.
        LachesisError: The launch file, the run or a value cannot be used.
    """
    base = _read_base(args, service)
    edits: list[tuple[str, Any]] = [parse_assignment(text) for text in args.edits]
    if args.steps is not None:
        edits.append(("env.total_steps", args.steps))
    if getattr(args, "others", None):
        edits.append(("env.mixture", dict(map(_parse_mixture_item, args.others))))
    return replace(
        base,
        profile=args.profile or base.profile,
        edits=(*base.edits, *edits),
        model=args.model or base.model,
        seed=base.seed if args.seed is None else args.seed,
        require_validation=args.require_validation or base.require_validation,
        without_validation=args.without_validation or base.without_validation,
        start_from=getattr(args, "start_from", None) or base.start_from,
        name=check_name(args.name or base.name or ""),
        note=check_note(args.note or base.note or ""),
        tags=tuple(check_tags([*base.tags, *args.tag])),
        by_owner=True,
    )


def _read_base(args: argparse.Namespace, service: LachesisService) -> LaunchRequest:
    """Return the launch of the file or of the run that was named, or that of the environment."""
    environment, like = args.environment, getattr(args, "like", None)
    if like:
        if environment:
            environment = register_environment(environment)
        record = service.get_run(like)
        return make_similar_request(service.store, record, environment, service.schema_timeout_s)
    if not environment:
        raise ArgumentsError(
            "nothing says what to train on; give an environment from `lachesis envs`, a launch "
            "file, or --like RUN"
        )
    if environment.endswith(LAUNCH_FILE_ENDINGS):
        return read_launch_file(Path(environment).expanduser(), service.schema_timeout_s)
    return LaunchRequest(register_environment(environment), args.profile or DEFAULT_PROFILE)


def _parse_mixture_item(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ENVIRONMENT or ENVIRONMENT=WEIGHT."""
    name, weight = parse_assignment(text if "=" in text else f"{text}=1")
    return register_environment(name), {"weight": read_untyped(weight)}
