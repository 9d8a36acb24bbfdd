"""Find environments whose groups are all invalid, and raise the error that says so.

The counts are those that the environment's process writes about itself; see
`lachesis.environment_process.rollout_counters`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lachesis.base.errors import InvalidGroupsError
from lachesis.base.json_text import Json
from lachesis.base.secrets import redact
from lachesis.runs.environment_counters import read_counts
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.runs.suggested_commands import format_command
from lachesis.supervision.services.plan import ServicePlan

# An environment is dead if its first groups, enough for this many batches, are all invalid.
NUM_DEAD_BATCHES = 3
# The stop reason of a run that ended because of that.


@dataclass(frozen=True)
class DeadEnvironment:
    """Describe an environment all of whose groups were invalid."""

    name: str
    file: str
    service: str
    log: Path
    num_groups: int
    """Number of its groups."""
    reasons: Mapping[str, int]
    """An example of each kind of failure, with its count."""

    def describe(self) -> str:
        """Say how many groups were invalid, the most frequent reason, and where to look."""
        reason, count = max(self.reasons.items(), key=lambda item: item[1], default=("", 0))
        if reason:
            example = f", most often by: {reason} ({count} times)"
        else:
            example = ""
        return (
            f"all of the first {self.num_groups} groups of {self.name} were invalid{example}; "
            f"`{format_command('env', 'check', str(self.file))}` runs it without training, and its "
            f"log is {self.log}"
        )


def has_usable_groups(counts: Json) -> bool:
    """Return whether an environment made a usable rollout, or dropped a group itself."""
    return bool(counts.get("rollouts") or counts.get("empty_groups"))


def count_invalid_groups(counts: Json, group_size: int) -> int:
    """Return how many groups of an environment were invalid, or 0 unless all of them were.

    A group that the environment dropped itself is not invalid. A request without a response spoils
    at most one group; that many groups are not the environment's fault and are not counted. A
    request that the server has refused is the environment's own fault.

    Args:
        counts: What the environment's process has counted.
        group_size: Rollouts per group.
    """
    if has_usable_groups(counts):
        return 0
    invalid = (
        int(counts.get("failed_groups") or 0)
        + int(counts.get("invalid_rollouts") or 0) // group_size
    )
    return max(0, invalid - int(counts.get("lost_requests") or 0))


def is_dead(counts: Json | None, *, group_size: int, batch_size: int) -> bool:
    """Return whether the groups of the first three batches were all invalid."""
    return (
        counts is not None
        and count_invalid_groups(counts, group_size) * group_size >= NUM_DEAD_BATCHES * batch_size
    )


def require_usable_groups(dead: Sequence[DeadEnvironment], num_environments: int) -> None:
    """Check that some environment of the run may still make usable groups.

    Args:
        dead: The environments that are dead.
        num_environments: How many environments the run has.

    Raises:
        InvalidGroupsError: All are dead.
    """
    if len(dead) == num_environments:
        reasons = "; ".join(environment.describe() for environment in dead)
        raise InvalidGroupsError(reasons, service=dead[0].service)


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
        record: RunRecord,
        plan: ServicePlan,
        *,
        received: Mapping[str, int] | None = None,
    ) -> None:
        """Watch the environments of a plan.

        Args:
            store: The runs of this home.
            record: The run in its attempt.
            plan: The plan of the attempt.
            received: How many groups training had received from each environment at the checkpoint
                that the attempt resumes from.
        """
        self.store, self.record, self.plan = store, record, plan
        self.run_id, self.folder = record.run_id, store.dir(record.run_id)
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
            InvalidGroupsError: All of them are dead.
        """
        self.remember_usable()
        dead = [
            dead_environment
            for service in self.plan.environment_names
            if (dead_environment := self._find_dead(service))
        ]
        require_usable_groups(dead, len(self.plan.environment_names))
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
            file=self.record.environment_files[name],
            service=service,
            log=self.folder.get_log_file(service),
            num_groups=count_invalid_groups(counts, env.group_size),
            reasons=counts.get("errors") or {},
        )

    def _read_counts(self, service: str) -> Json | None:
        """Return the counts of the environment's process in this attempt."""
        file = self.folder.get_counters_file(service)
        return read_counts(file, since=self.record.attempt_start_unix_s)
