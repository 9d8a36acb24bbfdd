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
from lachesis.supervision.group import ServiceGroup, death
from lachesis.supervision.process import Question, ServiceSpec

POLL_S = 0.1
MAX_LOG_BYTES = 50_000_000
MAX_PRINTED = f"{MAX_LOG_BYTES // 1_000_000} MB"


def wait_healthy(
    group: ServiceGroup,
    spec: ServiceSpec,
    needs: Sequence[str] | None = None,
    look: Callable[[], None] | None = None,
) -> float:
    """Seconds until `spec.ready()` was content. Raises ProcessExitedError at once when the process dies, and
    HealthTimeoutError after `spec.timeout_s` seconds when it only hangs. The death of one that it `needs`, of any of the group
    where nothing is said, fails the wait as well, and so does what `look` raises, which is called meanwhile."""
    started = time.monotonic()
    last = ""
    while (waited := time.monotonic() - started) < spec.timeout_s:
        for name in (spec.name, *(group.exited() if needs is None else needs)):  # what it waits for may have died too
            group.require(name)
        if look is not None:
            look()
        last = spec.ready()
        if not last:
            group.require(spec.name)  # another process may have answered at this port
            return waited
        time.sleep(POLL_S)
    raise HealthTimeoutError(
        f"{spec.name} is not healthy after {spec.timeout_s:.0f} s (last answer: {last}), see {spec.log}; its last lines:\n"
        f"{read_last_lines(spec.log)}",
        service=spec.name,
    )


def await_end(
    group: ServiceGroup,
    spec: ServiceSpec,
    needs: list[str],
    look: Callable[[], None] | None = None,
) -> None:
    """Wait until a process that ends by itself has ended well.

    Fails at once when a service that it needs dies, when it prints without end, and with what `look` raises, which is
    called meanwhile.
    """
    until = time.monotonic() + spec.timeout_s
    while group.wait(spec.name, timeout_s=1.0) is None and group.running(spec.name):
        for name in needs:
            group.require(name)
        if printed_too_much(spec):
            raise ProcessExitedError(f"{spec.name} printed more than {MAX_PRINTED} and was ended, see {spec.log}")
        if look is not None:
            look()
        if time.monotonic() > until:
            raise HealthTimeoutError(
                f"{spec.name} has not ended after {spec.timeout_s:.0f} s, see {spec.log}", service=spec.name
            )
    if group.exit_code(spec.name) != 0:
        raise death(spec, group.exit_code(spec.name))


def printed_too_much(spec: ServiceSpec) -> bool:
    """Return whether the log of a short-lived process is larger than `MAX_LOG_BYTES`; its caller ends the process."""
    with contextlib.suppress(FileNotFoundError):
        return spec.log.stat().st_size > MAX_LOG_BYTES
    return False


def http_question(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: Mapping[str, Any] | None = None,
    expect: Callable[[dict[str, Any]], bool] = lambda answer: True,
    otherwise: str = "",
) -> Question:
    """A question by HTTP GET: ready when the answer is 200 and `expect` holds of its JSON. `otherwise` says what another
    answer means."""

    def ask() -> str:
        try:
            answer = httpx.request(
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
        if answer.status_code != 200:
            return f"{otherwise}HTTP {answer.status_code} from {url}"
        try:
            content = answer.json()
        except ValueError:
            return f"no JSON from {url}"
        return "" if expect(content if isinstance(content, dict) else {}) else f"{answer.text[:200]} from {url}"

    return ask
