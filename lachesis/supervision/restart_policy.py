"""What the death of a service means while a run trains, in one table. While it starts, every death
ends the attempt.

An attempt that ends has its reason in the run's record; `lachesis resume`, or
`limits.on_crash=resume`, goes on from the newest whole checkpoint.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

from lachesis.supervision.process import get_service_role


@dataclass(frozen=True)
class RestartRule:
    """`pauses_s` are the seconds before each restart; without one the attempt ends."""

    meaning: str
    pauses_s: tuple[float, ...] = ()


RESTART_RULES = {
    "engine": RestartRule(
        "it holds the model, so the attempt ends with what the newest checkpoint has"
    ),
    "api": RestartRule(
        "it is started again, with a new environment; what was queued there is sampled anew",
        (1.0, 5.0, 15.0),
    ),
    "trainer": RestartRule(
        "the attempt ends; killed, with what the newest checkpoint has, else with a checkpoint of its last step"
    ),
    "environment": RestartRule(
        "it is started again where training stands, if it has ever given a group", (1.0, 10.0, 30.0)
    ),
}


def is_restartable(service: str | None) -> bool:
    """Whether the table has a restart for it."""
    rule = RESTART_RULES.get(get_service_role(service or ""))
    return rule is not None and bool(rule.pauses_s)


class RestartBudget:
    """Of one attempt."""

    def __init__(self) -> None:
        self.restarts_by_service: collections.Counter[str] = collections.Counter()

    def next_pause_s(self, service: str) -> float | None:
        """How long to wait before the service is started again, and count that; None when it shall
        not be.
        """
        pauses = RESTART_RULES[get_service_role(service)].pauses_s
        count = self.restarts_by_service[service]
        self.restarts_by_service[service] += 1
        return pauses[count] if count < len(pauses) else None
