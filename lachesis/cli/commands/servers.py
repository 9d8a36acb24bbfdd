"""Run `serve`, `ui`, `mcp`, `api` and `notifications`."""

import os
import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from lachesis.base import paths
from lachesis.base.argparse_types import PORT
from lachesis.base.errors import ConfigError, MissingDependencyError
from lachesis.cli import terminal
from lachesis.cli.options import Output, number, options_class
from lachesis.cli.terminal import print_answer
from lachesis.config.profiles import list_missing_modules
from lachesis.operations.server import (
    START_DURATION,
    make_serve_command,
    remove_notifications,
    set_notifications,
    stop_server,
)

LOOPBACK = "127.0.0.1"


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], Parameter("SHELL", help="the shell that reads it")
    ],
    /,
) -> None:
    """Print the code that makes a shell complete the words of `lachesis`."""
    from lachesis.cli.main import build_app

    print(build_app().generate_completion(shell=shell))


def serve(
    *,
    port: Annotated[
        int | None, number(PORT, "port of the Prefect server (default: 4200, or a free one)")
    ] = None,
    stop: Annotated[
        bool,
        Parameter(
            help="end the server and the runner, also those that `lachesis train` has started"
        ),
    ] = False,
    options: Output = Output(),
) -> None:
    """Replace this process by the program that starts the server and the runner, so that it gets
    the signals; with --stop, end the running servers.
    """
    if stop:
        server_info = stop_server()
        text = "no Prefect server of this home runs"
        if server_info:
            text = f"the Prefect server {server_info['ui_url']} and its runner have ended"
        terminal.print_answer(options, {"stopped": server_info is not None}, text)
        return
    command = make_serve_command(*(("--port", str(port)) if port else ()))
    terminal.print_note(
        f"starting the Prefect server and the runner ({START_DURATION}); Ctrl-C ends both"
    )
    os.chdir(paths.project_dir())
    os.execv(command[0], command)


@options_class
class Listening(Output):
    """Where a server listens."""

    host: Annotated[str | None, Parameter(help="address to listen on (default: 127.0.0.1)")] = None
    allow_host: Annotated[
        tuple[str, ...],
        Parameter(help="an additional host name of this server; may be repeated", metavar="NAME"),
    ] = ()


def mcp(
    *,
    http: Annotated[bool, Parameter(help="streamable HTTP instead of stdin and stdout")] = False,
    session: Annotated[
        str | None,
        Parameter(
            help="name of this agent's session (default: $LACHESIS_SESSION, or one per working "
            "folder)"
        ),
    ] = None,
    port: Annotated[int | None, number(PORT, "port to listen on (default: 8090)")] = None,
    options: Listening = Listening(),
) -> None:
    """Serve the tools over MCP: on stdio until it is closed, or over HTTP until Ctrl-C."""
    if list_missing_modules(["mcp"]):
        raise MissingDependencyError(
            "the MCP server needs mcp, which is not installed: pip install 'lachesis-rl[mcp]'"
        )
    from lachesis.agent_tools import mcp_server
    from lachesis.agent_tools.session import SessionFile, make_session_name
    from lachesis.base.http_guard import describe_token_location, load_or_create_token

    session_name = SessionFile(
        session or os.environ.get("LACHESIS_SESSION") or make_session_name()
    ).name
    if not http:
        if options.host or port or options.allow_host:
            raise ConfigError(
                "--host, --port and --allow-host are for `lachesis mcp --http`; over stdio nothing "
                "listens"
            )
        if sys.stdin.isatty():
            terminal.print_note(
                f"session {session_name}; an agent's client starts this command and talks to it; "
                f"Ctrl-C ends it"
            )
        mcp_server.serve_stdio(session_name)
        return
    host, port = options.host or LOOPBACK, port or 8090
    app = mcp_server.create_app(
        session_name, host=host, token=load_or_create_token(), allowed_hosts=options.allow_host
    )
    _run_server(
        app,
        host,
        port,
        f"MCP at http://{host}:{port}/mcp, with the bearer token in {describe_token_location()}",
    )


def api(
    *,
    no_token: Annotated[
        bool, Parameter(help="require no token, for clients that cannot send one; on loopback only")
    ] = False,
    port: Annotated[int, number(PORT, "port to listen on", default=8080)] = 8080,
    options: Listening = Listening(),
) -> None:
    """Serve the agents' tools over HTTP until Ctrl-C.

    A token is required unless --no-token says that any program on this machine may call.
    """
    from lachesis.agent_tools import http_routes
    from lachesis.base.http_guard import describe_token_location, load_or_create_token

    host = options.host or LOOPBACK
    token, token_note = None, ""
    if no_token:
        _require_loopback(host)
    else:
        token = load_or_create_token()
        token_note = f", with the bearer token in {describe_token_location()}"
    app = http_routes.create_app(host=host, token=token, allowed_hosts=options.allow_host)
    _run_server(
        app, host, port, f"HTTP service at http://{host}:{port}, its page at /docs{token_note}"
    )


def ui(
    *,
    no_token: Annotated[
        bool, Parameter(help="require no token; any program on this machine may read the pages")
    ] = False,
    port: Annotated[int | None, number(PORT, "port to listen on (default: 8070)")] = None,
    options: Listening = Listening(),
) -> None:
    """Serve the pages of this home until Ctrl-C, and print the link that opens them.

    If they are served already, print a new link to that server.
    """
    from lachesis.base.http_guard import is_loopback, load_or_create_token
    from lachesis.operations.server import check_port, choose_port
    from lachesis.web.server import (
        PREFERRED_PORT,
        announce_page_server,
        find_page_server,
        run_page_server,
    )
    from lachesis.web.sign_in import make_sign_in_link

    token = None if no_token else load_or_create_token()
    running_at = find_page_server()
    if running_at and not (port or options.host):
        terminal.print_sentence(make_sign_in_link(running_at, token))
        terminal.print_note("these pages are served already; the link signs a browser in")
        return
    host = options.host or LOOPBACK
    if no_token:
        _require_loopback(host)
    port = port or choose_port(PREFERRED_PORT)
    if is_loopback(host):
        check_port(port)
    address = f"http://{host}:{port}"
    terminal.print_sentence(make_sign_in_link(address, token))
    terminal.print_note("the link signs a browser in for ten minutes; Ctrl-C ends the pages")
    with announce_page_server(address):
        run_page_server(host, port, token, options.allow_host)


def _require_loopback(host: str) -> None:
    """Check that a server without a token cannot be reached from elsewhere.

    Raises:
        ConfigError: It can.
    """
    from lachesis.base.http_guard import is_loopback

    if not is_loopback(host):
        raise ConfigError(
            f"--no-token is for a server on loopback; {host} can be reached from elsewhere"
        )


def _run_server(app: object, host: str, port: int, description: str) -> None:
    """Serve an application on a port until Ctrl-C."""
    import uvicorn

    from lachesis.base.http_server import ReceiveDeadlineProtocol
    from lachesis.operations.server import check_port

    if host in ("127.0.0.1", "localhost"):
        check_port(port)
    terminal.print_note(f"{description}; Ctrl-C ends it")
    uvicorn.run(
        app,  # type: ignore[arg-type]
        http=ReceiveDeadlineProtocol,
        host=host,
        port=port,
        log_level="warning",
    )


def set_webhook(
    webhook: Annotated[str, Parameter("URL", help="URL to call; a second call replaces it")],
    /,
    *,
    options: Output = Output(),
) -> None:
    """Let the Prefect server call a web address when a run fails, stalls or finishes."""
    names = set_notifications(webhook)
    print_answer(
        options,
        {"automations": names, "webhook": webhook},
        f"{', '.join(names) or 'no automation'}: call {webhook}",
    )


def remove_webhook(*, options: Output = Output()) -> None:
    """Let the Prefect server call no web address any more."""
    names = remove_notifications()
    print_answer(
        options,
        {"automations": names, "webhook": None},
        f"{', '.join(names) or 'no automation'}: removed",
    )
