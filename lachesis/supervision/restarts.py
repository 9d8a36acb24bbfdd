"""Define what the death of a service means during training; while a run starts, it ends the
attempt.

The reason for the end of an attempt is in the run's record; `lachesis resume`, or
`limits.on_crash=resume`, continues from the newest complete checkpoint.
"""

import collections
import logging
import time
from dataclasses import dataclass

from lachesis.base.errors import ProcessExitedError
from lachesis.runs.environment_counters import read_counts
from lachesis.supervision.readiness import (
    RunServices,
    count_registered_environments,
    disconnect_environment,
    fetch_trainer_health,
)
from lachesis.supervision.services.order import get_service_role
from lachesis.supervision.services.plan import ServicePlan
from lachesis.supervision.services.spec import ServiceSpec
from lachesis.supervision.stop_requests import StopCheck

log = logging.getLogger("lachesis.flow")
POLL_S = 0.5


@dataclass(frozen=True)
class RestartRule:
    """Say how often a service is restarted: `pauses_s` has the seconds before each restart."""

    meaning: str
    pauses_s: tuple[float, ...] = ()


RESTART_RULES = {
    "backend": RestartRule(
        "it holds the model, so the attempt ends with the state of the newest checkpoint"
    ),
    "engine": RestartRule(
        "it holds the model, so the attempt ends with the state of the newest checkpoint"
    ),
    "api": RestartRule(
        "it is restarted, with a new environment; what was queued is sampled again",
        (1.0, 5.0, 15.0),
    ),
    "trainer": RestartRule(
        "the attempt ends: with the state of the newest checkpoint if it was killed, else with a "
        "checkpoint of its last step"
    ),
    "environment": RestartRule(
        "it is restarted where training is, if it has ever made a group", (1.0, 10.0, 30.0)
    ),
}


def is_restartable(service: str | None) -> bool:
    """Return whether a service is ever restarted."""
    rule = RESTART_RULES.get(get_service_role(service or ""))
    return rule is not None and bool(rule.pauses_s)


class RestartBudget:
    """Count the restarts of one attempt."""

    def __init__(self) -> None:
        self.restarts_by_service: collections.Counter[str] = collections.Counter()

    def next_pause_s(self, service: str) -> float | None:
        """Return the pause before the next restart and count it; None if none is left."""
        pauses = RESTART_RULES[get_service_role(service)].pauses_s
        count = self.restarts_by_service[service]
        self.restarts_by_service[service] += 1
        if count < len(pauses):
            return pauses[count]
        return None


class ServiceRestarter:
    """Restart the services of one attempt, unless it should end."""

    def __init__(self, services: RunServices, plan: ServicePlan, stop_check: StopCheck) -> None:
        self.services, self.plan, self.stop_check = services, plan, stop_check
        self.store, self.run_id, self.group = services.store, services.run_id, services.group
        self.restart_budget = RestartBudget()
        # The ids under which the current API has registered the environments.
        self.env_ids = {service: env_id for env_id, service in enumerate(plan.environment_names)}
        self.disconnected_ids: set[int] = set()

    def restart(self, name: str, problem: ProcessExitedError) -> None:
        """Restart a dead service after a pause, if its restarts are not used up.

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
        self.services.write(phase="training")

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
        health, env_id = fetch_trainer_health(self.plan), self._wait_for_next_id()
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

    def _wait_for_next_id(self) -> int:
        """Return the id that the API will give to the next environment, when it responds.

        Another id would be that of a living or a dead environment.
        """
        while (env_id := count_registered_environments(self.plan)) is None:
            self._wait_before_restart(POLL_S)
        return env_id

    def _wait_before_restart(self, seconds: float) -> None:
        """Wait, and raise ProcessExitedError if a service dies that cannot be restarted."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name in self._list_required_services():
                self.group.require_running(name)
            self.stop_check.check_now_and_then()
            time.sleep(POLL_S)

    def _start_and_wait(self, spec: ServiceSpec) -> None:
        self.stop_check.check()
        needs = [*self._list_required_services(), *(["api"] if spec.name in self.env_ids else [])]
        self.services.start(spec)
        self.services.write()
        on_poll = self.stop_check.check_now_and_then
        self.services.wait_until_ready(spec, needs, on_poll=on_poll)

    def _list_required_services(self) -> list[str]:
        """Return the services whose death ends the attempt."""
        return [
            spec.name
            for spec in self.plan.services
            if not is_restartable(get_service_role(spec.name))
        ]
