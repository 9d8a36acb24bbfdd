"""Find, start and end the Prefect server, the runner and their leftovers, for all surfaces."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lachesis.base.errors import ServerDownError
from lachesis.config.installation_settings import is_env_flag_set
from lachesis.prefect_client import background_serve
from lachesis.prefect_client.background_serve import (
    LauncherProcess,
    find_running_server,
    find_server_problem,
    get_max_runs,
    make_serve_command,
    require_server,
    stop_server,
)
from lachesis.prefect_client.notifications import remove_notifications, set_notifications
from lachesis.prefect_client.serve_info import find_api_url, read_server_info
from lachesis.supervision.leftovers import Leftover, find_all_leftovers
from lachesis.supervision.services.ports import check_port, choose_port

__all__ = [
    "LauncherProcess",
    "Leftover",
    "check_port",
    "choose_port",
    "find_all_leftovers",
    "find_api_url",
    "find_running_server",
    "find_server_problem",
    "get_max_runs",
    "make_serve_command",
    "read_server_info",
    "remove_notifications",
    "require_server",
    "set_notifications",
    "stop_server",
]
T = TypeVar("T")
START_DURATION = "about 10 s; the first time 20 s"
"""How long the Prefect server and the runner take to start."""


def can_start_server() -> bool:
    """Return whether a server may be started here, and none runs."""
    return not is_env_flag_set("LACHESIS_NO_SERVE") and background_serve.can_start_server()


def call_with_server(
    call: Callable[[], T],
    announce: Callable[[str], None],
    *,
    is_forbidden: bool = False,
    home: Path | None = None,
) -> T:
    """Return the result of `call`; start a server and call again if only a server is missing.

    The server and its runner outlive this process. Callers that come at the same time get the same
    server.

    Args:
        call: Checks everything else before it needs a server, and can be called again.
        announce: Told that a server starts, which takes some seconds, and then where it is.
        is_forbidden: Whether the user has forbidden a start, as $LACHESIS_NO_SERVE also does.
        home: The home whose server must still answer after the call, where the call only knows of a
            server.

    Raises:
        ServerDownError: No server runs here, and none may be started.
        LachesisError: What `call` has raised.
    """
    try:
        answer = call()
        if home:
            background_serve.require_server(home)
    except ServerDownError:
        if is_forbidden or not can_start_server():
            raise
    else:
        return answer
    announce(
        "no Prefect server runs here; starting one and a runner in the background "
        f"({START_DURATION})"
    )
    server_info = background_serve.start_background_server()
    announce(f"Prefect pages: {server_info.get('ui_url')}; `lachesis serve --stop` ends both")
    return call()
