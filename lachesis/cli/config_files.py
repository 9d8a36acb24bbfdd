"""Run `lachesis config`: write a launch file, or the JSON schema of launch files."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from lachesis.cli.launch_options import read_launch_request
from lachesis.cli.options.common import DEFAULT_PROFILE
from lachesis.config.profiles import load_profile_values
from lachesis.environment_catalog.lookup import find_environment, load_schema, register_environment
from lachesis.launch.launch_file import make_launch_schema, render_launch_file
from lachesis.operations.service import LachesisService


def handle_config(args: argparse.Namespace) -> None:
    """Print a launch file; with --schema the JSON schema."""
    service = LachesisService()
    if args.schema:
        _print_schema(args)
        return
    request = read_launch_request(args, service)
    description = service.describe(request)
    if args.json:
        print(json.dumps(description, indent=2, default=str))
    else:
        # The defaults are those of the profile, not those of the schema.
        defaults = service.describe(replace(request, edits=(), seed=None))
        print(render_launch_file(request, description, defaults), end="")


def _print_schema(args: argparse.Namespace) -> None:
    profile = args.profile or DEFAULT_PROFILE
    load_profile_values(profile)  # refuses an unknown profile
    schema = None
    if args.environment:
        schema = load_schema(find_environment(register_environment(args.environment)))
    print(json.dumps(make_launch_schema(profile, schema), indent=2, default=str))
