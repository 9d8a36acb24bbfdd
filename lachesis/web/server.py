"""Run the page server of a home, and find the one that runs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from lachesis.base import paths
from lachesis.base.files import write_private

PREFERRED_PORT = 8070


def get_info_file(home: Path | None = None) -> Path:
    """Return the file in which the page server says where it listens."""
    return (home or paths.home()) / "ui.json"


def find_page_server(home: Path | None = None) -> str | None:
    """Return the address of the page server of this home, or None if none runs."""
    try:
        info = json.loads(get_info_file(home).read_text())
        process = psutil.Process(info["pid"])
        # The id of a process that has ended may belong to another one by now.
        is_same = abs(process.create_time() - info["process_started_at"]) < 1
        return str(info["address"]) if is_same and process.is_running() else None
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return None


@contextlib.contextmanager
def announce_page_server(address: str, home: Path | None = None) -> Iterator[None]:
    """Say in the home that its pages are served at this address, until the block ends."""
    file = get_info_file(home)
    # The process may be killed, and its number be given to another one.
    info = {
        "address": address,
        "pid": os.getpid(),
        "process_started_at": psutil.Process().create_time(),
    }
    write_private(file, json.dumps(info))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(file.read_text())["pid"] == os.getpid():
                file.unlink()


def run_page_server(
    host: str,
    port: int,
    token: str | None,
    allowed_hosts: Iterable[str] = (),
    *,
    listeners: Sequence[socket.socket] | None = None,
) -> None:
    """Serve the pages of this home until SIGTERM or SIGINT.

    Args:
        host: The address to listen on.
        port: The port to listen on.
        token: What readers must know; None for no token.
        allowed_hosts: Further names of this server.
        listeners: Sockets that listen there already; None opens one.
    """
    import uvicorn

    from lachesis.base.http_server import ReceiveDeadlineProtocol
    from lachesis.web.app import create_app

    config = uvicorn.Config(
        create_app(host=host, token=token, allowed_hosts=allowed_hosts),  # type: ignore[arg-type]
        http=ReceiveDeadlineProtocol,
        host=host,
        port=port,
        log_level="warning",
        # Streams of open pages end when the server does.
        timeout_graceful_shutdown=2,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(None if listeners is None else list(listeners))
