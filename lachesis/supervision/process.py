"""Describe a service by its command and its readiness check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Returns an empty text if the service is ready, else what it responded.
ReadinessCheck = Callable[[], str]


@dataclass(frozen=True)
class ServiceSpec:
    """Describe one service of a run.

    `env` is added to the filtered environment and may hold the secrets that this child needs.
    `log_command` prints the log, if there is a command for it.
    """

    name: str
    argv: list[str]
    log: Path
    cwd: Path
    env: dict[str, str] = field(default_factory=dict)
    port: int | None = None
    check_ready: ReadinessCheck = lambda: ""
    timeout_s: float = 120.0
    grace_s: float = 10.0
    log_command: str = ""

    @property
    def log_advice(self) -> str:
        """Return how to read the log, for the end of an error message."""
        if self.log_command:
            return f"`{self.log_command}` shows its log"
        return f"see {self.log}"


def get_service_role(service: str) -> str:
    """Return the role of a service; `environment-reverse_text` has the role `environment`."""
    return service.partition("-")[0]
