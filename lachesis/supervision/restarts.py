"""Define what the death of a service means during training; while a run starts, it ends the
attempt.

The reason for the end of an attempt is in the run's record; `lachesis resume`, or
`limits.on_crash=resume`, continues from the newest complete checkpoint.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

from lachesis.supervision.services.spec import get_service_role


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
        """Return how long to wait before the next restart and count it; None if there is none
        left.
        """
        pauses = RESTART_RULES[get_service_role(service)].pauses_s
        count = self.restarts_by_service[service]
        self.restarts_by_service[service] += 1
        if count < len(pauses):
            return pauses[count]
        return None
