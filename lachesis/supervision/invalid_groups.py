"""Find environments whose groups are all invalid, and raise the error that says so.

The counts are those that the environment's process writes about itself; see
`lachesis.environment_process.rollout_counters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lachesis.base.errors import InvalidGroupsError
from lachesis.base.json_text import Json

# An environment is dead if its first groups, enough for this many batches, are all invalid.
NUM_DEAD_BATCHES = 3
# The stop reason of a run that ended because of that.
ALL_INVALID = "all groups were invalid"


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
            f"`lachesis env check {self.file}` runs it without training, and its log is {self.log}"
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
