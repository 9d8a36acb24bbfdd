"""Wait until a service is ready for its next user, or say why it is not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from lachesis.base.errors import HealthTimeoutError, ProcessExitedError
from lachesis.base.files import read_last_lines
from lachesis.base.tls import get_tls_context
from lachesis.supervision.group import ServiceGroup, make_exit_error
from lachesis.supervision.process import ReadinessCheck, ServiceSpec

POLL_S = 0.1
MAX_LOG_BYTES = 50_000_000
MAX_LOG_SIZE_TEXT = f"{MAX_LOG_BYTES // 1_000_000} MB"


def wait_until_healthy(
    group: ServiceGroup,
    spec: ServiceSpec,
    needs: Sequence[str] | None = None,
    on_poll: Callable[[], None] | None = None,
) -> float:
    """Seconds until `spec.ready()` was content. Raises ProcessExitedError at once when the process
    dies, and HealthTimeoutError after `spec.timeout_s` seconds when it only hangs. The death of one
    that it `needs`, of any of the group where nothing is said, fails the wait as well, and so does
    what `look` raises, which is called meanwhile.
    """
    started = time.monotonic()
    last_answer = ""
    while (waited_s := time.monotonic() - started) < spec.timeout_s:
        # what it waits for may have died too
        for name in (spec.name, *(group.collect_exit_codes() if needs is None else needs)):
            group.require_running(name)
        if on_poll is not None:
            on_poll()
        last_answer = spec.check_ready()
        if not last_answer:
            group.require_running(spec.name)  # another process may have answered at this port
            return waited_s
        time.sleep(POLL_S)
    raise HealthTimeoutError(
        f"{spec.name} is not healthy after {spec.timeout_s:.0f} s (last answer: {last_answer}), see {spec.log}; its last lines:\n"
        f"{read_last_lines(spec.log)}",
        service=spec.name,
    )


def wait_until_ended(
    group: ServiceGroup,
    spec: ServiceSpec,
    needs: list[str],
    on_poll: Callable[[], None] | None = None,
) -> None:
    """Wait until a process that ends by itself has ended well.

    Fails at once when a service that it needs dies, when it prints without end, and with what
    `look` raises, which is called meanwhile.
    """
    until = time.monotonic() + spec.timeout_s
    while group.wait(spec.name, timeout_s=1.0) is None and group.is_running(spec.name):
        for name in needs:
            group.require_running(name)
        if is_log_too_large(spec):
            raise ProcessExitedError(
                f"{spec.name} printed more than {MAX_LOG_SIZE_TEXT} and was ended, see {spec.log}"
            )
        if on_poll is not None:
            on_poll()
        if time.monotonic() > until:
            raise HealthTimeoutError(
                f"{spec.name} has not ended after {spec.timeout_s:.0f} s, see {spec.log}",
                service=spec.name,
            )
    if group.get_exit_code(spec.name) != 0:
        raise make_exit_error(spec, group.get_exit_code(spec.name))


def is_log_too_large(spec: ServiceSpec) -> bool:
    """Return whether the log of a short-lived process is larger than `MAX_LOG_BYTES`; its caller
    ends the process.
    """
    with contextlib.suppress(FileNotFoundError):
        return spec.log.stat().st_size > MAX_LOG_BYTES
    return False


def make_http_readiness_check(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: Mapping[str, Any] | None = None,
    expect: Callable[[dict[str, Any]], bool] = lambda content: True,
    error_prefix: str = "",
) -> ReadinessCheck:
    """A question by HTTP GET: ready when the answer is 200 and `expect` holds of its JSON.
    `otherwise` says what another answer means.
    """

    def check_url() -> str:
        try:
            response = httpx.request(
                "GET",
                url,
                headers=dict(headers or {}),
                json=body,
                timeout=3.0,
                trust_env=False,
                verify=get_tls_context(),
            )
        except httpx.HTTPError as error:
            return f"{type(error).__name__} from {url}"
        if response.status_code != 200:
            return f"{error_prefix}HTTP {response.status_code} from {url}"
        try:
            content = response.json()
        except ValueError:
            return f"no JSON from {url}"
        return (
            ""
            if expect(content if isinstance(content, dict) else {})
            else f"{response.text[:200]} from {url}"
        )

    return check_url
