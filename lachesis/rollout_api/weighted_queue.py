"""Share the batches of one run between several environments by their weights.

Atropos uses an environment's weight to limit its requests in flight, up to 512 in all; in most runs
this limits nothing, and the fastest environment fills the batches. Here the next group comes from
the connected environment that has had the fewest rollouts for its weight (stride scheduling,
Waldspurger and Weihl 1995, MIT/LCS/TM-528). A batch waits for the slowest environment, and
`/status-env` tells the others that their share is full.
"""

import math
from collections.abc import Iterator
from typing import Any

from lachesis.base.json_text import Json


class WeightedQueue:
    """Order the groups of environments, after all `num_expected` have registered."""

    def __init__(self, num_expected: int) -> None:
        self.num_expected = num_expected
        # Waiting groups by the number of their environment, the oldest first.
        self.waiting_groups: dict[Any, list[Json]] = {}
        # Released rollouts of each environment divided by its weight.
        self._pass_values: dict[Any, float] = {}
        # Groups in the API's queue.
        self._released_groups: list[Json] = []

    def arrange(self, queue: list[Json], envs: list[Json]) -> None:
        """Take new groups out of the queue, and put those back whose turn it is."""
        if self.num_expected < 2:
            return
        released_ids = {id(group) for group in self._released_groups}
        for group in queue:
            if id(group) not in released_ids:
                self.waiting_groups.setdefault(group.get("env_id"), []).append(group)
        # The list is changed in place, because Atropos holds it too.
        queue[:] = [group for group in queue if id(group) in released_ids]
        if len(envs) >= self.num_expected:
            queue.extend(self._release_groups(read_weights(envs)))
        self._released_groups = list(queue)

    def drop_excess(self, num_allowed: float, envs: list[Json]) -> int:
        """Drop the oldest waiting groups of each environment that exceeds its share.

        Args:
            num_allowed: How many rollouts of all environments together may wait. An environment's
                share of it is proportional to its weight.
            envs: The environments as registered with Atropos.

        Returns:
            The number of dropped groups.
        """
        num_dropped, weights_by_id = 0, read_weights(envs)
        for environment_id, groups in self.waiting_groups.items():
            max_rollouts = (
                num_allowed
                * weights_by_id.get(environment_id, 0.0)
                / (sum(weights_by_id.values()) or 1.0)
            )
            while len(groups) > 1 and sum(map(_count_rollouts, groups)) > max_rollouts:
                groups.pop(0)
                num_dropped += 1
        return num_dropped

    def compute_queue_size(self, environment_id: int, queue: list[Json], envs: list[Json]) -> int:
        """Return the queue length to report to one environment.

        It is the environment's own waiting rollouts times the total weight over its own weight, as
        if the others had equally many waiting for their weights.
        """
        weights_by_id = read_weights(envs)
        own_groups = [
            *self.waiting_groups.get(environment_id, ()),
            *(group for group in queue if group.get("env_id") == environment_id),
        ]
        if environment_id in weights_by_id:
            return math.floor(
                sum(map(_count_rollouts, own_groups))
                * sum(weights_by_id.values())
                / weights_by_id[environment_id]
            )
        return 0

    def is_awaited(self, environment_id: int, envs: list[Json]) -> bool:
        """Return whether the groups of others wait for a group of this environment."""
        return environment_id == self._find_awaited_id(envs)

    def find_awaited_environment(self, envs: list[Json]) -> str | None:
        """Return the name of the environment that the groups of others wait for, if any."""
        awaited_id = self._find_awaited_id(envs)
        return next(
            (str(env["desired_name"]) for env in envs if env["registered_id"] == awaited_id), None
        )

    def _find_awaited_id(self, envs: list[Json]) -> int | None:
        """Return the environment whose group is next by weight; None until all have registered."""
        weights_by_id = read_weights(envs)
        if not any(self.waiting_groups.values()) or len(envs) < self.num_expected:
            return None
        return min(
            weights_by_id,
            key=lambda candidate_id: self._pass_values.get(candidate_id, 0.0),
            default=None,
        )

    def _release_groups(self, weights_by_id: dict[Any, float]) -> Iterator[Json]:
        """Yield the groups whose turn it is, and those of environments that are gone."""
        for environment_id in [
            waiting_id for waiting_id in self.waiting_groups if waiting_id not in weights_by_id
        ]:
            # An environment that has disconnected has no share any more.
            yield from self.waiting_groups.pop(environment_id)
        min_pass = min(
            (
                self._pass_values[environment_id]
                for environment_id in weights_by_id
                if environment_id in self._pass_values
            ),
            default=0.0,
        )
        # A new environment starts level with the others, so that it does not catch up on the past.
        self._pass_values = {
            environment_id: self._pass_values.get(environment_id, min_pass)
            for environment_id in weights_by_id
        }
        while weights_by_id:
            environment_id = min(
                weights_by_id, key=lambda candidate_id: self._pass_values[candidate_id]
            )
            if not self.waiting_groups.get(environment_id):
                return
            group = self.waiting_groups[environment_id].pop(0)
            self._pass_values[environment_id] += (
                _count_rollouts(group) / weights_by_id[environment_id]
            )
            yield group


def read_weights(envs: list[Json]) -> dict[Any, float]:
    """Return the weights of the connected environments by their numbers."""
    return {
        env["registered_id"]: max(1e-3, float(env["weight"]))
        for env in envs
        if env.get("connected")
    }


def _count_rollouts(group: Json) -> int:
    return len(group["tokens"])
