"""Serve an engine over HTTP: the port, the token, and the limits of requests."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

from lachesis.base.errors import LachesisError, MissingKeyError, PortInUseError
from lachesis.base.http_guard import HttpGuard
from lachesis.tinker_server.engine_interface import TinkerEngine

TOKEN_VARIABLE = "LACHESIS_ENGINE_TOKEN"
# Maximum size of a request; the SDK sends a batch in chunks of at most 500 MB.
MAX_BODY_BYTES = 600_000_000
# How long open responses may delay the shutdown; a long poll would take half a minute.
SHUTDOWN_TIMEOUT_S = 3


def run_program(serve: Callable[[], None]) -> int:
    """Serve until SIGTERM. On an error, print it as the last line of stderr and return 1."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        serve()
    except LachesisError as error:
        # On one line, because the last line of the log is read as the cause.
        print(" ".join(f"{error.code}: {error}".split()), file=sys.stderr)
        return 1
    return 0


def read_token() -> str:
    """Return the token that clients must send.

    Raises:
        MissingKeyError: The variable does not hold one.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token.startswith("tml-"):
        raise MissingKeyError(
            f"{TOKEN_VARIABLE} must hold a token that begins with tml- (the SDK refuses others)"
        )
    return token


@contextlib.contextmanager
def bind_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that is bound to a port, before anything slow is done.

    Raises:
        PortInUseError: The port cannot be used.
    """
    # The explicit protocol lets asyncio recognise TCP and send small responses at once
    # (TCP_NODELAY).
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise PortInUseError(
                f"port {port} on {host} cannot be used: {error.strerror}"
            ) from error
        yield listener


def serve_engine(
    engine: TinkerEngine,
    token: str,
    listener: socket.socket,
    *,
    host: str,
    allowed_hosts: Sequence[str] = (),
) -> None:
    """Serve an engine over HTTP until SIGTERM."""
    import uvicorn

    from lachesis.base.http_server import ReceiveDeadlineProtocol
    from lachesis.tinker_server.routes import create_app

    app = HttpGuard(
        create_app(engine, token),
        host=host,
        token=None,
        allowed_hosts=allowed_hosts,
        max_body_bytes=MAX_BODY_BYTES,
    )
    config = uvicorn.Config(
        app,
        http=ReceiveDeadlineProtocol,
        log_level="warning",
        timeout_keep_alive=120,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    uvicorn.Server(config).run(sockets=[listener])
