"""Read the options that `lachesis train` and `lachesis schedule` share."""

from __future__ import annotations

import argparse
from typing import Any

from lachesis.catalog.describe import register_environment
from lachesis.config.edits import parse_assignment
from lachesis.orchestration.launch_inputs import LaunchRequest


def read_launch_request(args: argparse.Namespace) -> LaunchRequest:
    """Return the launch that the options describe, without the rights of the owner."""
    edits: list[tuple[str, Any]] = [parse_assignment(text) for text in args.edits]
    if args.steps is not None:
        edits.append(("env.total_steps", args.steps))
    return LaunchRequest(
        register_environment(args.environment),
        args.profile,
        tuple(edits),
        args.model,
        args.seed,
        args.require_validation,
        name=args.name,
    )
