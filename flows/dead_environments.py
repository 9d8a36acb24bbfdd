"""Watch whether the environments of a run make usable groups."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lachesis.base.errors import InvalidGroupsError
from lachesis.base.json_text import Json
from lachesis.base.secrets import redact
from lachesis.runs.environment_counters import read_counts
from lachesis.runs.store import RunStore
from lachesis.supervision.invalid_groups import (
    ALL_INVALID,
    DeadEnvironment,
    count_invalid_groups,
    has_usable_groups,
    is_dead,
    require_usable_groups,
)
from lachesis.supervision.services.plan import ServicePlan

log = logging.getLogger("lachesis.flow")


class DeadEnvironmentDetector:
    """End an attempt none of whose environments makes a group that can be trained on.

    An environment that has ever made a usable group is not called dead, because what it needs, such
    as a verifier, may be unavailable for a while. Its process counts from 0 whenever it is started,
    so this is remembered here, and for a resumed run read from the checkpoint.
    """

    def __init__(
        self,
        store: RunStore,
        run_id: str,
        plan: ServicePlan,
        *,
        received: Mapping[str, int] | None = None,
    ) -> None:
        """Watch the environments of a plan.

        Args:
            store: The runs of this home.
            run_id: The run.
            plan: The plan of its attempt.
            received: How many groups training had received from each environment at the checkpoint
                that the attempt resumes from.
        """
        self.store, self.run_id, self.plan = store, run_id, plan
        self.folder = store.dir(run_id)
        received_groups = received or {}
        # Services that have made a usable group.
        self._usable_services = {
            service for service, name in plan.environment_names.items() if received_groups.get(name)
        }
        # Dead environments that were already logged and recorded.
        self._reported_names: set[str] = set()

    def check(self) -> None:
        """Find environments that are dead, and log and record each of them.

        Raises:
            InvalidGroupsError: All of them are dead. The record then has a stop reason, so that no
                policy resumes the run.
        """
        self.remember_usable()
        dead = [
            dead_environment
            for service in self.plan.environment_names
            if (dead_environment := self._find_dead(service))
        ]
        try:
            require_usable_groups(dead, len(self.plan.environment_names))
        except InvalidGroupsError:
            self.store.update(self.run_id, stop_reason=ALL_INVALID)
            raise
        names = {environment.name for environment in dead}
        if names == self._reported_names:
            return
        for environment in dead:
            if environment.name not in self._reported_names:
                log.warning("the run waits for another environment: %s", environment.describe())
        descriptions = {environment.name: redact(environment.describe()) for environment in dead}
        self.store.update(self.run_id, dead_environments=descriptions)
        self._reported_names = names

    def remember_usable(self) -> None:
        """Remember which environments have made a usable group.

        Call this before one is restarted, which resets its counts.
        """
        for service in self.plan.environment_names:
            if has_usable_groups(self._read_counts(service) or {}):
                self._usable_services.add(service)

    def _find_dead(self, service: str) -> DeadEnvironment | None:
        """Return the environment of this service if all its groups were invalid."""
        name, counts = self.plan.environment_names[service], self._read_counts(service)
        env = self.plan.config.build_environment_configs()[name].env
        batch_size = self.plan.config.env.batch_size
        if counts is None or service in self._usable_services:
            return None
        if not is_dead(counts, group_size=env.group_size, batch_size=batch_size):
            return None
        return DeadEnvironment(
            name=name,
            file=self.store.load(self.run_id).environment_files[name],
            service=service,
            log=self.folder.get_log_file(service),
            num_groups=count_invalid_groups(counts, env.group_size),
            reasons=counts.get("errors") or {},
        )

    def _read_counts(self, service: str) -> Json | None:
        """Return what the environment's process of this attempt has counted."""
        since = self.store.load(self.run_id).attempt_start_unix_s
        return read_counts(self.folder.get_counters_file(service), since=since)
