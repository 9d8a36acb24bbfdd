"""Declare the arguments of the commands that serve pages and agents, and that call webhooks."""

from __future__ import annotations

import argparse

from lachesis.base.argparse_types import PORT
from lachesis.cli.options.common import AddCommand


def add_server_commands(add_command: AddCommand) -> None:
    """Add the servers for people and agents, and notifications."""
    ui = add_command(
        "ui",
        "Serve pages that show the runs: curves while they train, rollouts, comparisons.",
        "lachesis ui",
    )
    ui.add_argument(
        "--open",
        action="store_true",
        help="require no token; any program on this machine may read the pages",
    )
    _add_listening(ui, port=8070)
    mcp = add_command(
        "mcp", "Serve the tools to an agent by the Model Context Protocol.", "lachesis mcp"
    )
    mcp.add_argument(
        "--http", action="store_true", help="streamable HTTP instead of stdin and stdout"
    )
    mcp.add_argument(
        "--session",
        help="name of this agent's session (default: $LACHESIS_SESSION, or one per working folder)",
    )
    _add_listening(mcp, port=8090)
    api = add_command(
        "api",
        "Serve the tools as plain HTTP routes, with a page at /docs.",
        "lachesis api --port 8080",
    )
    api.add_argument(
        "--open",
        action="store_true",
        help="require no token, for clients that cannot send one; on loopback only",
    )
    _add_listening(api, port=8080)
    _add_notifications(add_command)


def _add_notifications(add_command: AddCommand) -> None:
    notifications = add_command(
        "notifications",
        "Call a webhook from the Prefect server when a run fails, stalls or finishes.",
        "lachesis notifications --webhook https://example.org/hook",
    )
    action = notifications.add_mutually_exclusive_group(required=True)
    action.add_argument("--webhook", metavar="URL", help="URL to call; a second call replaces it")
    action.add_argument("--remove", action="store_true", help="call no web address any more")


def _add_listening(command: argparse.ArgumentParser, port: int) -> None:
    command.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=PORT, help=f"default: {port}")
    command.add_argument(
        "--allow-host",
        action="append",
        metavar="NAME",
        help="an additional host name of this server; may be repeated",
    )
    command.set_defaults(default_port=port)
