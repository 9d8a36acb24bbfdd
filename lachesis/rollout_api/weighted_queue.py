"""In the rollout API: several environments share the batches of one run by their weights.

Atropos limits by an environment's weight how many requests it may have in flight, up to 512 in all; in most runs that limits
nothing, and whoever is fastest fills the batches. Here a group waits for its environment's turn: the next group of the queue is
one of the connected environment that has had the fewest rollouts for its weight (stride scheduling, Waldspurger and Weihl 1995,
MIT/LCS/TM-528). A batch waits for the slowest environment, and `/status-env` tells the others that their share is full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]


class Shares:
    """`expected` environments will register; no group has its turn before. One alone shares with nobody."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.waiting: dict[Any, list[Json]] = {}
        """Groups by number of their environment, the oldest first."""
        self._had: dict[Any, float] = {}
        """Rollouts of each, over its weight."""
        self._queued: list[Json] = []
        """The groups of the queue that have had their turn."""

    def arrange(self, queue: list[Json], envs: list[Json]) -> None:
        """Take out of the queue what came since the last time, and put in whose turn it is."""
        if self.expected < 2:
            return
        kept = {id(group) for group in self._queued}
        for group in queue:
            if id(group) not in kept:
                self.waiting.setdefault(group.get("env_id"), []).append(group)
        queue[:] = [group for group in queue if id(group) in kept]
        if len(envs) >= self.expected:
            queue.extend(self._turns(weights(envs)))
        self._queued = list(queue)

    def bound(self, rollouts: float, envs: list[Json]) -> int:
        """Drop the oldest groups of each environment that has more rollouts waiting than its share of so many; how many."""
        dropped, known = 0, weights(envs)
        for number, groups in self.waiting.items():
            most = rollouts * known.get(number, 0.0) / (sum(known.values()) or 1.0)
            while len(groups) > 1 and sum(map(_size, groups)) > most:
                groups.pop(0)
                dropped += 1
        return dropped

    def seen_by(self, number: int, queue: list[Json], envs: list[Json]) -> int:
        """Rollouts that wait, as one environment is told: as many as if the others had as much waiting for their weights."""
        known = weights(envs)
        own = [*self.waiting.get(number, ()), *(group for group in queue if group.get("env_id") == number)]
        return math.floor(sum(map(_size, own)) * sum(known.values()) / known[number]) if number in known else 0

    def turn(self, envs: list[Json]) -> str | None:
        """The environment that the groups of others wait for."""
        if not any(self.waiting.values()) or len(envs) < self.expected:
            return None
        number = min(known, key=lambda one: self._had.get(one, 0.0)) if (known := weights(envs)) else None
        return next((str(env["desired_name"]) for env in envs if env["registered_id"] == number), None)

    def _turns(self, known: dict[Any, float]) -> Iterator[Json]:
        for number in [one for one in self.waiting if one not in known]:
            yield from self.waiting.pop(number)  # its environment is gone, and shares no more
        least = min((self._had[number] for number in known if number in self._had), default=0.0)
        self._had = {number: self._had.get(number, least) for number in known}  # who is new is owed nothing
        while known:
            number = min(known, key=lambda one: self._had[one])
            if not self.waiting.get(number):
                return
            group = self.waiting[number].pop(0)
            self._had[number] += _size(group) / known[number]
            yield group


def weights(envs: list[Json]) -> dict[Any, float]:
    """Of the connected environments, by number."""
    return {env["registered_id"]: max(1e-3, float(env["weight"])) for env in envs if env.get("connected")}


def _size(group: Json) -> int:
    return len(group["tokens"])
