"""Services that died are started again while a run trains, as the table of `supervision.policy` says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from flows.wanted import seldom
from lachesis.base.errors import ProcessExitedError
from lachesis.runs.environment_counts import read_counts
from lachesis.runs.store import RunStore
from lachesis.supervision.group import ServiceGroup
from lachesis.supervision.plan import ServicePlan, disconnect_environment, count_registered_environments, fetch_trainer_health
from lachesis.supervision.process import ServiceSpec, get_service_role
from lachesis.supervision.restart_policy import RestartBudget, is_restartable
from tasks.processes import start_service, wait_for_service

log = logging.getLogger("lachesis.flow")
POLL_S = 0.5


class Restarting:
    """Of one attempt. `require_wanted` raises when no service shall start any more."""

    def __init__(
        self, store: RunStore, run_id: str, group: ServiceGroup, plan: ServicePlan, require_wanted: Callable[[], None]
    ) -> None:
        self.store, self.run_id, self.group, self.plan = store, run_id, group, plan
        self.require_wanted = require_wanted
        self.look = seldom(require_wanted)
        self.restarts = RestartBudget()
        self.numbers = {service: number for number, service in enumerate(plan.environment_names)}
        """What the living API knows the environments by."""
        self.forgotten: set[int] = set()

    def restart(self, name: str, problem: ProcessExitedError) -> None:
        """Start a dead service again. Another death meanwhile is left to the next look where it may be mended. Raises the
        problem when there is no restart for it."""
        pause_s = self.restarts.next_pause_s(name)
        since = self.store.load(self.run_id).attempt_start_unix_s  # what an earlier attempt has counted proves nothing
        tally = read_counts(self.store.dir(self.run_id).get_counters_file(name), since=since) or {}
        if pause_s is None or (name in self.numbers and not tally.get("groups")):
            raise problem
        log.warning("%s is started again in %.0f s: %s", name, pause_s, problem)
        self.store.update(self.run_id, phase=f"restarting {name}")
        try:
            self._watch_others(pause_s)
            if name == "api":
                self._restart_api()
            else:
                before = self.numbers[name]
                self._start_environment(name)
                self.forget(before)  # until now its share is kept for it
        except ProcessExitedError as error:
            if not is_restartable(error.details.get("service")):
                raise
            log.warning("%s", error)
        self.store.update(self.run_id, phase="training")

    def forget(self, number: int) -> None:
        """Tell the API, once, that this environment is gone."""
        if number not in self.forgotten:
            self.forgotten.add(number)
            disconnect_environment(self.plan, number)

    def _restart_api(self) -> None:
        """With new environments, as it remembers nothing."""
        for environment in self.numbers:
            if self.group.has_service(environment):
                self.group.stop(environment)
                self.group.forget_service(environment)
        self._start_again(self.plan.get_service("api"))
        self.forgotten = set()
        for environment in self.numbers:
            try:
                self._start_environment(environment)
            except ProcessExitedError as error:
                if error.details.get("service") != environment:
                    raise
                log.warning("%s", error)  # the next look sees to it; the others start meanwhile

    def _start_environment(self, service: str) -> None:
        """From where training stands."""
        health, number = fetch_trainer_health(self.plan), count_registered_environments(self.plan)
        self.numbers[service] = number
        name = self.plan.environment_names[service]
        groups = int(((health.get("mixture") or {}).get(name) if len(self.numbers) > 1 else health.get("groups")) or 0)
        self._start_again(self.plan.make_restart_spec(service, groups=groups, env_id=number))

    def _watch_others(self, seconds: float) -> None:
        """Wait, unless one of those dies that cannot be started again. Raises ProcessExitedError."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name in self._needed():
                self.group.require_running(name)
            self.look()
            time.sleep(POLL_S)

    def _start_again(self, spec: ServiceSpec) -> None:
        self.require_wanted()
        start_service(self.group, spec, self.store, self.run_id)
        needs = [*self._needed(), *(["api"] if spec.name in self.numbers else [])]
        wait_for_service(self.group, spec, self.store, self.run_id, needs=needs, look=self.look)

    def _needed(self) -> list[str]:
        """Those whose death ends the attempt."""
        return [spec.name for spec in self.plan.services if not is_restartable(get_service_role(spec.name))]
