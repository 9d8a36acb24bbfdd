"""Serve an ASGI application on loopback, in a thread of the test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import uvicorn

from lachesis.base.http_guard import ASGIApp
from lachesis.supervision.services.ports import reserve_free_ports
from tests.patience import deadline


@contextlib.contextmanager
def serve(app: ASGIApp, port: int | None = None) -> Iterator[str]:
    """The address of a real server of this application, which ends with the block."""
    port = port or reserve_free_ports(1)[0]
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until = deadline(30)
    while not server.started and time.monotonic() < until:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)
