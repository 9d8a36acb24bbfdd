"""Start the Prefect server and the runner for a tool that needs them and finds none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lachesis.agent_tools.draft import ReportProgress
from lachesis.agent_tools.schemas import StartAnswer, TestReport
from lachesis.base.errors import ServerDownError
from lachesis.config.installation_settings import is_env_flag_set
from lachesis.prefect_client import background_serve

Answer = TypeVar("Answer", StartAnswer, TestReport)
# Seconds that a first start takes, as an agent's client shows them.
USUAL_START_S = 20.0


def can_start_server() -> bool:
    """Return whether tools may start a server here, and none runs."""
    return not is_env_flag_set("LACHESIS_NO_SERVE") and background_serve.can_start_server()


def call_with_server(call: Callable[[], Answer], report_progress: ReportProgress) -> Answer:
    """Return what `call` returns; start a server if that is all that it lacks.

    The server and its runner outlive the agent, and the answer says so. Agents that come at the
    same time get the same server.

    Args:
        call: Checks everything before it needs a server, and can be called again.
        report_progress: Called before the start, which takes some seconds.

    Raises:
        ServerDownError: $LACHESIS_NO_SERVE forbids a start, or the server is somebody else's.
        LachesisError: What `call` has raised.
    """
    try:
        return call()
    except ServerDownError:
        if not can_start_server():
            raise
    report_progress(0.0, USUAL_START_S, "no Prefect server runs here; starting one and a runner")
    server_info = background_serve.start_background_server()
    note = (
        "no Prefect server ran here, so one was started in the background with a runner: "
        f"{server_info.get('ui_url')}; `lachesis serve --stop` ends both"
    )
    return call().model_copy(update={"server_started": note})
