"""What the death of a service means while a run trains, in one table. While it starts, every death ends the attempt.

An attempt that ends has its reason in the run's record; `lachesis resume`, or `limits.on_crash=resume`, goes on from
the newest whole checkpoint.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

from lachesis.supervision.process import role


@dataclass(frozen=True)
class Death:
    """`pauses_s` are the seconds before each restart; without one the attempt ends."""

    meaning: str
    pauses_s: tuple[float, ...] = ()


DEATHS = {
    "engine": Death("it holds the model, so the attempt ends with what the newest checkpoint has"),
    "api": Death("it is started again, with a new environment; what was queued there is sampled anew", (1.0, 5.0, 15.0)),
    "trainer": Death("the attempt ends; killed, with what the newest checkpoint has, else with a checkpoint of its last step"),
    "environment": Death("it is started again where training stands, if it has ever given a group", (1.0, 10.0, 30.0)),
}


def may_be_restarted(service: str | None) -> bool:
    """Whether the table has a restart for it."""
    death = DEATHS.get(role(service or ""))
    return death is not None and bool(death.pauses_s)


class Restarts:
    """Of one attempt."""

    def __init__(self) -> None:
        self.made: collections.Counter[str] = collections.Counter()

    def pause_s(self, service: str) -> float | None:
        """How long to wait before the service is started again, and count that; None when it shall not be."""
        pauses = DEATHS[role(service)].pauses_s
        count = self.made[service]
        self.made[service] += 1
        return pauses[count] if count < len(pauses) else None
