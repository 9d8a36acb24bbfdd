"""Wait until a service is ready or has ended, and ask trainer and rollout API how they are."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from lachesis.base.errors import HealthTimeoutError, ProcessExitedError
from lachesis.base.http_client import request_service
from lachesis.runs.store import RunStore
from lachesis.supervision.running_services import ServiceGroup, make_exit_error
from lachesis.supervision.services.plan import ServicePlan
from lachesis.supervision.services.spec import ServiceSpec

log = logging.getLogger("lachesis.flow")
# Does a step of a run, and shows it under its name; what the step raises is raised again.
ShowStep = Callable[[str, Callable[[], Any]], Any]
POLL_S = 0.1
MAX_LOG_BYTES = 50_000_000
MAX_LOG_SIZE_TEXT = f"{MAX_LOG_BYTES // 1_000_000} MB"


def wait_until_healthy(
    group: ServiceGroup,
    spec: ServiceSpec,
    needs: Sequence[str] | None = None,
    on_poll: Callable[[], None] | None = None,
) -> float:
    """Wait until `spec.check_ready()` succeeds, and return the seconds it took.

    Args:
        group: The services of the run.
        spec: The service to wait for.
        needs: Services whose death fails the wait as well; by default all of the group.
        on_poll: Called now and then; what it raises ends the wait.

    Raises:
        ProcessExitedError: A process has died.
        HealthTimeoutError: The service was not ready after `spec.timeout_s` seconds.
    """
    started = time.monotonic()
    last_answer = ""
    while (waited_s := time.monotonic() - started) < spec.timeout_s:
        # A service that this one waits for may have died too.
        for name in (spec.name, *(group.collect_exit_codes() if needs is None else needs)):
            group.require_running(name)
        if on_poll is not None:
            on_poll()
        last_answer = spec.check_ready()
        if not last_answer:
            group.require_running(spec.name)  # Another process may have responded at this port.
            return waited_s
        time.sleep(POLL_S)
    raise HealthTimeoutError(
        f"{spec.name} is not healthy after {spec.timeout_s:.0f} s (last response: {last_answer}); "
        f"{spec.log_advice}",
        service=spec.name,
    )


def wait_until_ended(
    group: ServiceGroup,
    spec: ServiceSpec,
    needs: list[str],
    on_poll: Callable[[], None] | None = None,
) -> None:
    """Wait until a process that ends by itself has ended successfully.

    Args:
        group: The services of the run.
        spec: The process to wait for.
        needs: Services whose death fails the wait.
        on_poll: Called now and then; what it raises ends the wait.

    Raises:
        ProcessExitedError: It failed, printed endlessly, or a service that it needs has died.
        HealthTimeoutError: It has not ended after `spec.timeout_s` seconds.
    """
    until = time.monotonic() + spec.timeout_s
    while group.wait(spec.name, timeout_s=1.0) is None and group.is_running(spec.name):
        for name in needs:
            group.require_running(name)
        if is_log_too_large(spec):
            raise ProcessExitedError(
                f"{spec.name} printed more than {MAX_LOG_SIZE_TEXT} and was killed; "
                f"{spec.log_advice}"
            )
        if on_poll is not None:
            on_poll()
        if time.monotonic() > until:
            raise HealthTimeoutError(
                f"{spec.name} has not ended after {spec.timeout_s:.0f} s; {spec.log_advice}",
                service=spec.name,
            )
    if group.get_exit_code(spec.name) != 0:
        raise make_exit_error(spec, group.get_exit_code(spec.name))


def is_log_too_large(spec: ServiceSpec) -> bool:
    """Return whether the log of a short-lived process is larger than `MAX_LOG_BYTES`."""
    with contextlib.suppress(FileNotFoundError):
        return spec.log.stat().st_size > MAX_LOG_BYTES
    return False


def fetch_trainer_health(plan: ServicePlan) -> dict[str, Any]:
    """Return the health report of the trainer; empty if it does not respond."""
    try:
        response = request_service("GET", f"{plan.trainer_url}/health")
        content = response.json()
    except (httpx.HTTPError, ValueError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


def count_registered_environments(plan: ServicePlan) -> int | None:
    """Return the number of registered environments, the next id; None without answer."""
    try:
        response = request_service("GET", f"{plan.config.env.rollout_server_url}/counts")
        return int(response.json()["registered"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def disconnect_environment(plan: ServicePlan, env_id: int) -> None:
    """Tell the API that an environment is gone, so that its successor gets its share."""
    with contextlib.suppress(httpx.HTTPError):
        url = f"{plan.config.env.rollout_server_url}/disconnect-env"
        request_service("POST", url, json={"env_id": env_id})


@dataclass(frozen=True)
class RunServices:
    """Start the services of a run.

    Each start and each wait is a step that whoever supervises can show, and goes into the run's
    record with the next `write`.
    """

    group: ServiceGroup
    store: RunStore
    run_id: str
    show_step: ShowStep
    unwritten: dict[str, dict[str, object]] = field(default_factory=dict)
    """Holds what has happened to services since the last `write`, by their names."""

    def write(self, **changes: object) -> None:
        """Write the states of the services, and these fields, into the record."""
        services = dict(self.unwritten)
        self.unwritten.clear()
        if services or changes:
            self.store.update_services(self.run_id, services, **changes)

    def start(self, spec: ServiceSpec) -> None:
        """Start a service.

        Raises:
            ProcessExitedError: It cannot be started.
        """
        self.show_step(f"start {spec.name}", lambda: self._start(spec))

    def _start(self, spec: ServiceSpec) -> None:
        """Start a service, and note its process for the record."""
        pid = self.group.start(spec)
        self.unwritten[spec.name] = {
            "pid": pid,
            "port": spec.port,
            "log": str(spec.log),
            "state": "starting",
        }
        port_text = f" and port {spec.port}" if spec.port else ""
        log.info("%s was started with process id %d%s", spec.name, pid, port_text)

    def wait_until_ready(
        self,
        spec: ServiceSpec,
        needs: Sequence[str] | None = None,
        on_poll: Callable[[], None] | None = None,
    ) -> None:
        """Wait until a service is ready; see `wait_until_healthy`."""

        def wait() -> None:
            waited_s = wait_until_healthy(self.group, spec, needs, on_poll=on_poll)
            command = f"; `{spec.log_command}` shows its log" if spec.log_command else ""
            log.info("%s is healthy after %.1f s%s", spec.name, waited_s, command)
            self.unwritten.setdefault(spec.name, {})["state"] = "running"

        self.show_step(f"wait until {spec.name} is healthy", wait)
