"""Run the page server of a home, and find the running server."""

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lachesis.base import paths
from lachesis.base.files import write_private
from lachesis.base.managed_process import ProcessIdentity

PREFERRED_PORT = 8070


def get_info_file(home: Path | None = None) -> Path:
    """Return the file in which the page server says where it listens."""
    return (home or paths.home()) / "ui.json"


def find_page_server(home: Path | None = None) -> str | None:
    """Return the address of the page server of this home, or None if none runs."""
    try:
        info = json.loads(get_info_file(home).read_text())
        # A copied home is not served by what serves the one that it was copied from.
        if info["home"] != str(home or paths.home()):
            return None
        identity = ProcessIdentity.from_json(info["process"])
        return str(info["address"]) if identity is not None and identity.is_alive() else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@contextlib.contextmanager
def announce_page_server(address: str, home: Path | None = None) -> Iterator[None]:
    """Say in the home that its pages are served at this address, until the block ends."""
    file = get_info_file(home)
    identity = ProcessIdentity.read(os.getpid())
    assert identity is not None
    info = {"home": str(home or paths.home()), "address": address, "process": asdict(identity)}
    write_private(file, json.dumps(info))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(file.read_text())["process"] == asdict(identity):
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
