"""Restart services that die during training, as `lachesis.supervision.restarts` defines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from flows.stop_requests import throttle
from lachesis.base.errors import ProcessExitedError
from lachesis.runs.environment_counters import read_counts
from lachesis.runs.store import RunStore
from lachesis.supervision.readiness import (
    count_registered_environments,
    disconnect_environment,
    fetch_trainer_health,
)
from lachesis.supervision.restarts import RestartBudget, is_restartable
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.plan import ServicePlan
from lachesis.supervision.services.spec import ServiceSpec, get_service_role
from tasks.processes import start_service, wait_for_service

log = logging.getLogger("lachesis.flow")
POLL_S = 0.5


class ServiceRestarter:
    """Restart the services of one attempt; `raise_if_stop_requested` prevents it once a stop is
    requested.
    """

    def __init__(
        self,
        store: RunStore,
        run_id: str,
        group: ServiceGroup,
        plan: ServicePlan,
        raise_if_stop_requested: Callable[[], None],
    ) -> None:
        self.store, self.run_id, self.group, self.plan = store, run_id, group, plan
        self.raise_if_stop_requested = raise_if_stop_requested
        self.check_stop_request = throttle(raise_if_stop_requested)
        self.restart_budget = RestartBudget()
        # The ids under which the current API has registered the environments.
        self.env_ids = {service: env_id for env_id, service in enumerate(plan.environment_names)}
        self.disconnected_ids: set[int] = set()

    def restart(self, name: str, problem: ProcessExitedError) -> None:
        """Restart a dead service.

        Another death meanwhile is left to the next check if that service can be restarted.

        Raises:
            ProcessExitedError: There is no restart for the service.
        """
        pause_s = self.restart_budget.next_pause_s(name)
        # Counts of an earlier attempt do not show that the environment works.
        since = self.store.load(self.run_id).attempt_start_unix_s
        counts = read_counts(self.store.dir(self.run_id).get_counters_file(name), since=since) or {}
        if pause_s is None or (name in self.env_ids and not counts.get("groups")):
            raise problem
        log.warning("%s will be restarted in %.0f s: %s", name, pause_s, problem)
        self.store.update(self.run_id, phase=f"restarting {name}")
        try:
            self._wait_before_restart(pause_s)
            if name == "api":
                self._restart_api()
            else:
                old_env_id = self.env_ids[name]
                self._start_environment(name)
                self.disconnect(old_env_id)  # Its share was kept until now.
        except ProcessExitedError as error:
            if not is_restartable(error.details.get("service")):
                raise
            log.warning("%s", error)
        self.store.update(self.run_id, phase="training")

    def disconnect(self, env_id: int) -> None:
        """Tell the API once that this environment is gone."""
        if env_id not in self.disconnected_ids:
            self.disconnected_ids.add(env_id)
            disconnect_environment(self.plan, env_id)

    def _restart_api(self) -> None:
        """Restart the API with new environments, because it has lost its state."""
        for environment in self.env_ids:
            if self.group.has_service(environment):
                self.group.stop(environment)
                self.group.forget_service(environment)
        self._start_and_wait(self.plan.get_service("api"))
        self.disconnected_ids = set()
        for environment in self.env_ids:
            try:
                self._start_environment(environment)
            except ProcessExitedError as error:
                if error.details.get("service") != environment:
                    raise
                log.warning("%s", error)  # The next check handles it; the others start meanwhile.

    def _start_environment(self, service: str) -> None:
        """Start an environment at the position of training."""
        # The API numbers environments in the order of their registration.
        health, env_id = fetch_trainer_health(self.plan), count_registered_environments(self.plan)
        self.env_ids[service] = env_id
        name = self.plan.environment_names[service]
        groups = int(
            (
                (health.get("groups_by_environment") or {}).get(name)
                if len(self.env_ids) > 1
                else health.get("groups")
            )
            or 0
        )
        self._start_and_wait(self.plan.make_restart_spec(service, groups=groups, env_id=env_id))

    def _wait_before_restart(self, seconds: float) -> None:
        """Wait, and raise ProcessExitedError if a service dies that cannot be restarted."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name in self._list_required_services():
                self.group.require_running(name)
            self.check_stop_request()
            time.sleep(POLL_S)

    def _start_and_wait(self, spec: ServiceSpec) -> None:
        self.raise_if_stop_requested()
        start_service(self.group, spec, self.store, self.run_id)
        needs = [*self._list_required_services(), *(["api"] if spec.name in self.env_ids else [])]
        wait_for_service(
            self.group, spec, self.store, self.run_id, needs=needs, on_poll=self.check_stop_request
        )

    def _list_required_services(self) -> list[str]:
        """Return the services whose death ends the attempt."""
        return [
            spec.name
            for spec in self.plan.services
            if not is_restartable(get_service_role(spec.name))
        ]
