"""Reserve free ports for the services of a run, and check a port that somebody has chosen."""

import atexit
import fcntl
import os
import platform
import socket
import tempfile
from collections import deque
from pathlib import Path

from lachesis.base.errors import PortInUseError

_RESERVED_SOCKETS: deque[socket.socket] = deque()
_MAX_RESERVED_SOCKETS = 64
# The ports that this process has locked, with the descriptors of their lock files.
_PORT_LOCKS: dict[int, int] = {}


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
    """Return the preferred port, or a free one if another living process has it."""
    try:
        check_port(preferred)
    except PortInUseError:
        return reserve_free_ports(1)[0]
    if _lock_port(preferred):
        return preferred
    # The other process does not listen yet, so the system may give its port as a free one.
    return next(port for port in reserve_free_ports(2) if port != preferred)


def _lock_port(port: int) -> bool:
    """Return whether this process is the first to choose the port, until it ends.

    A server listens seconds after its port was chosen, so a second launcher finds the port free
    too. Its runner would then serve the flow runs of the first one's home.
    """
    if port in _PORT_LOCKS:
        return True
    path = Path(tempfile.gettempdir()) / f"lachesis-{os.getuid()}-port-{port}.lock"
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError:
        return True  # A file that is not ours says nothing.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    _PORT_LOCKS[port] = lock
    return True
