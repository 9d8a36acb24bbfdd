"""Run the long-running commands: the Prefect server and runner, pages, and servers for agents."""

from __future__ import annotations

import argparse
import os
import sys

from lachesis.base import paths
from lachesis.base.errors import ConfigError, MissingDependencyError
from lachesis.cli import console
from lachesis.config.profiles import list_missing_modules
from lachesis.prefect_client import background_serve


def handle_serve(args: argparse.Namespace) -> int:
    """Replace this process by the one that starts the server and the runner, so that it gets the
    signals; with --stop, end those that run.
    """
    if args.stop:
        server_info = background_serve.stop_server()
        text = "no Prefect server of this home runs"
        if server_info:
            text = f"the Prefect server {server_info['ui_url']} and its runner have ended"
        console.print_answer(args, {"stopped": server_info is not None}, text)
        return 0
    command = background_serve.make_serve_command(
        *(["--port", str(args.port)] if args.port is not None else [])
    )
    console.print_note(
        "starting the Prefect server and the runner (about 10 s; the first time 20 s); Ctrl-C ends "
        "both"
    )
    os.chdir(paths.project_dir())
    os.execv(command[0], command)
    return 1


def handle_mcp(args: argparse.Namespace) -> int:
    """Serve the tools over MCP: over stdio until stdin is closed, or over HTTP with a token until
    Ctrl-C.
    """
    if list_missing_modules(["mcp"]):
        raise MissingDependencyError(
            "the MCP server needs mcp, which is not installed: pip install 'lachesis-rl[mcp]'"
        )
    from lachesis.agent_tools import mcp_server
    from lachesis.agent_tools.session import SessionFile, make_session_name
    from lachesis.base.http_guard import describe_token_location, load_or_create_token

    session_name = SessionFile(
        args.session or os.environ.get("LACHESIS_SESSION") or make_session_name()
    ).name
    if not args.http:
        if args.host or args.port or args.allow_host:
            raise ConfigError(
                "--host, --port and --allow-host are for `lachesis mcp --http`; over stdio nothing "
                "listens"
            )
        if sys.stdin.isatty():
            console.print_note(
                f"session {session_name}; an agent's client starts this command and talks to it; "
                f"Ctrl-C ends it"
            )
        mcp_server.serve_stdio(session_name)
        return 0
    host, port, allowed_hosts = _read_listen_address(args)
    app = mcp_server.create_app(
        session_name, host=host, token=load_or_create_token(), allowed_hosts=allowed_hosts
    )
    return _run_server(
        app,
        host,
        port,
        f"MCP at http://{host}:{port}/mcp, with the bearer token in {describe_token_location()}",
    )


def handle_api(args: argparse.Namespace) -> int:
    """Serve the tools over HTTP.

    A token is required unless --open says that any program on this machine may call the service.
    """
    from lachesis.agent_tools import http_routes
    from lachesis.base.http_guard import describe_token_location, load_or_create_token

    host, port, allowed_hosts = _read_listen_address(args)
    _require_loopback_for_open(args, host)
    token = None if args.open else load_or_create_token()
    app = http_routes.create_app(host=host, token=token, allowed_hosts=allowed_hosts)
    if args.open:
        token_note = ""
    else:
        token_note = f", with the bearer token in {describe_token_location()}"
    return _run_server(
        app, host, port, f"HTTP service at http://{host}:{port}, its page at /docs{token_note}"
    )


def handle_ui(args: argparse.Namespace) -> int:
    """Serve the pages of this home until Ctrl-C, and print the link that opens them.

    If they are served already, print a new link to that server.
    """
    from lachesis.base.http_guard import is_loopback, load_or_create_token
    from lachesis.supervision.services.ports import check_port, choose_port
    from lachesis.web.serving import (
        PREFERRED_PORT,
        announce_page_server,
        find_page_server,
        run_page_server,
    )
    from lachesis.web.sign_in import make_sign_in_link

    token = None if args.open else load_or_create_token()
    running_at = find_page_server()
    if running_at and not (args.port or args.host):
        link = make_sign_in_link(running_at, token)
        console.print_sentence(f"{link}")
        console.print_note("these pages are served already; the link signs a browser in")
        return 0
    host, _, allowed_hosts = _read_listen_address(args)
    _require_loopback_for_open(args, host)
    port = args.port or choose_port(PREFERRED_PORT)
    if is_loopback(host):
        check_port(port)
    address = f"http://{host}:{port}"
    console.print_sentence(make_sign_in_link(address, token))
    console.print_note("the link signs a browser in for ten minutes; Ctrl-C ends the pages")
    with announce_page_server(address):
        run_page_server(host, port, token, allowed_hosts)
    return 0


def _require_loopback_for_open(args: argparse.Namespace, host: str) -> None:
    from lachesis.base.http_guard import is_loopback

    if args.open and not is_loopback(host):
        raise ConfigError(
            f"--open is for a server on loopback; {host} can be reached from elsewhere"
        )


def _read_listen_address(args: argparse.Namespace) -> tuple[str, int, list[str]]:
    return args.host or "127.0.0.1", args.port or args.default_port, args.allow_host or []


def _run_server(app: object, host: str, port: int, description: str) -> int:
    import uvicorn

    from lachesis.base.http_server import ReceiveDeadlineProtocol
    from lachesis.supervision.services.ports import check_port

    if host in ("127.0.0.1", "localhost"):
        check_port(port)
    console.print_note(f"{description}; Ctrl-C ends it")
    uvicorn.run(
        app,  # type: ignore[arg-type]
        http=ReceiveDeadlineProtocol,
        host=host,
        port=port,
        log_level="warning",
    )
    return 0
