"""Start the Prefect server and the runner for a command that needs them and finds none."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from lachesis.base.errors import ServerDownError
from lachesis.cli import console
from lachesis.operations.service import LachesisService
from lachesis.prefect_client import background_serve

T = TypeVar("T")


def check_with_server(
    args: argparse.Namespace, service: LachesisService, check: Callable[[], T]
) -> T:
    """Return what `check` returns; start a server if that is all that it lacks.

    What is refused for another reason is refused before a server is started.

    Args:
        args: The arguments of the command, with `no_serve`.
        service: The service of this home.
        check: Checks everything that the command needs, a server last.

    Raises:
        ServerDownError: No server runs here, and --no-serve forbids to start one.
        LachesisError: What `check` has raised.
    """
    try:
        checked = check()
        # A server that is known may be gone.
        background_serve.require_server(service.store.home)
    except ServerDownError:
        if args.no_serve or not background_serve.can_start_server():
            raise
    else:
        return checked
    console.print_note(
        "no Prefect server runs here; starting one and a runner in the background (about 10 s; the "
        "first time 20 s)"
    )
    server_info = background_serve.start_background_server()
    console.print_note(
        f"Prefect pages: {server_info.get('ui_url')}; `lachesis serve --stop` ends both"
    )
    return check()
