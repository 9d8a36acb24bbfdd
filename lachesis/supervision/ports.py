"""Reserve free ports for the services of a run, and check a port that somebody has chosen."""

from __future__ import annotations

import atexit
import platform
import socket
from collections import deque

from lachesis.base.errors import PortInUseError

_RESERVED_SOCKETS: deque[socket.socket] = deque()
_MAX_RESERVED_SOCKETS = 64


def reserve_free_ports(count: int) -> list[int]:
    """Return different free ports on loopback, and keep them free for children of this process.

    On Linux the sockets stay bound without listening. The system then gives the ports to no other
    program and to no connection, while a server that sets SO_REUSEADDR (as asyncio and uvicorn do)
    can listen on them. Other systems refuse the second socket, so there the ports were only free
    when they were chosen.
    """
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        # Without it the service could not bind the port as long as this socket exists.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    _RESERVED_SOCKETS.extend(sockets)
    # The oldest are released first, as their services have had the time to listen.
    _release_ports(_MAX_RESERVED_SOCKETS if platform.system() == "Linux" else 0)
    return ports


def _release_ports(max_reserved: int = 0) -> None:
    """Close the sockets of the ports that were reserved first, until `max_reserved` are left."""
    while len(_RESERVED_SOCKETS) > max_reserved:
        _RESERVED_SOCKETS.popleft().close()


atexit.register(_release_ports)


def check_port(port: int) -> None:
    """Raise PortInUseError if the port is in use or out of range."""
    if not 0 < port < 65536:
        raise PortInUseError(f"port {port} is out of range; allowed: 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PortInUseError(
                f"port {port} on 127.0.0.1 is in use by another process; choose another one with "
                f"--port"
            ) from error


def open_listener(preferred: int) -> socket.socket:
    """Return a socket that listens on the preferred port of loopback, or a free one if that is
    in use.

    A port that is only chosen may be taken by another program before a child listens on it; this
    socket can be handed to the child.
    """
    try:
        return socket.create_server(("127.0.0.1", preferred))
    except OSError:
        return socket.create_server(("127.0.0.1", 0))


def choose_port(preferred: int) -> int:
    """Return the preferred port, or a free one if that is in use."""
    try:
        check_port(preferred)
    except PortInUseError:
        return reserve_free_ports(1)[0]
    return preferred
