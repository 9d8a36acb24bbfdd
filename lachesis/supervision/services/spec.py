"""Describe a service by its command and by the check of its readiness, such as an HTTP request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lachesis.base.http_client import request_service

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


def make_http_readiness_check(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: Mapping[str, Any] | None = None,
    expect: Callable[[dict[str, Any]], bool] = lambda content: True,
    error_prefix: str = "",
) -> ReadinessCheck:
    """Return a check that succeeds if the response has status 200 and `expect` accepts its JSON.

    `error_prefix` explains what any other response means.
    """

    def check_url() -> str:
        """Return why the service is not ready, or an empty string."""
        try:
            response = request_service("GET", url, headers=dict(headers or {}), json=body)
        except httpx.HTTPError as error:
            return f"{type(error).__name__} from {url}"
        if response.status_code != 200:
            return f"{error_prefix}HTTP {response.status_code} from {url}"
        try:
            content = response.json()
        except ValueError:
            return f"the response from {url} is not JSON"
        if expect(content if isinstance(content, dict) else {}):
            return ""
        return f"{response.text[:200]} from {url}"

    return check_url
