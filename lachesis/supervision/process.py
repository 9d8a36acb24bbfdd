"""What a service is: its command, what it may see of our environment, and how to know that it is ready."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lachesis.errors import PortInUseError

Question = Callable[[], str]
"""Asks a service whether it is ready: "" when it is, else what it answered."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
# SLURM_* and INFER_TP change server addresses in Atropos, ATROPOS_* its dialect, OPENAI_* where environments send requests,
# PREFECT_* would let a child act on the flow's behalf.
_MISLEADING = re.compile(r"^(SLURM_|ATROPOS_|OPENAI_|PREFECT_|INFER_TP$|TINKER_|LACHESIS_ENGINE_)")


@dataclass(frozen=True)
class ServiceSpec:
    """One service of a run. `env` is added to the filtered environment and may hold the secrets that this child needs."""

    name: str
    argv: list[str]
    log: Path
    cwd: Path
    env: dict[str, str] = field(default_factory=dict)
    port: int | None = None
    ready: Question = lambda: ""
    timeout_s: float = 120.0
    grace_s: float = 10.0


def child_environment(extra: Mapping[str, str], source: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without secrets and without what would mislead a child, then `extra`."""
    base = os.environ if source is None else source
    kept = {name: value for name, value in base.items() if not _SECRET.search(name) and not _MISLEADING.match(name)}
    return {**kept, **extra}


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def check_port(port: int) -> None:
    """Raises PortInUseError when the port is taken, or is no port."""
    if not 0 < port < 65536:
        raise PortInUseError(f"port {port} is out of range; allowed: 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PortInUseError(f"port {port} on 127.0.0.1 is in use by another process; choose another one") from error


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log, or "" when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
