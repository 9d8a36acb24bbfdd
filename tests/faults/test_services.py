"""Signals to the services of a run."""

import pytest

from tests.faults.signals import KILL, STOP, TERM, Case, play

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]
CASES = [
    Case("engine", KILL, "starting", "failed", "engine was killed by signal 9"),
    Case("engine", TERM, "starting", "failed", "engine was killed by signal 15"),
    Case("engine", STOP, "starting", "running"),
    Case("engine", KILL, "running", "failed", "engine was killed by signal 9", resume=True),
    Case("engine", TERM, "running", "failed", "engine "),
    Case("engine", STOP, "running", "running"),
    Case("engine", KILL, "checkpointing", "failed", "engine was killed by signal 9", resume=True),
    Case("engine", TERM, "checkpointing", "failed", "engine "),
    Case("engine", STOP, "checkpointing", "running"),
    Case("api", KILL, "starting", "failed", "api was killed by signal 9"),
    Case("api", TERM, "starting", "failed", "api "),
    Case("api", STOP, "starting", "running"),
    Case("api", KILL, "running", "running"),
    Case("api", TERM, "running", "running"),
    Case("api", STOP, "running", "running"),
    Case("api", KILL, "checkpointing", "running"),
    Case("api", TERM, "checkpointing", "running"),
    Case("api", STOP, "checkpointing", "running"),
    Case("trainer", KILL, "starting", "failed", "trainer was killed by signal 9", resume=True),
    Case("trainer", TERM, "starting", "failed", "trainer "),
    Case("trainer", STOP, "starting", "running"),
    Case("trainer", KILL, "running", "failed", "trainer was killed by signal 9", resume=True),
    Case(
        "trainer",
        TERM,
        "running",
        "failed",
        "the trainer was stopped by another program",
        resume=True,
        told=True,
    ),
    Case("trainer", STOP, "running", "running"),
    Case("trainer", KILL, "checkpointing", "failed", "trainer was killed by signal 9", resume=True),
    Case(
        "trainer",
        TERM,
        "checkpointing",
        "failed",
        "the trainer was stopped by another program",
        told=True,
    ),
    Case("trainer", STOP, "checkpointing", "running"),
    Case("environment", KILL, "starting", "failed", "environment was killed by signal 9"),
    Case("environment", TERM, "starting", "failed", "environment was killed by signal 15"),
    Case("environment", STOP, "starting", "running"),
    Case("environment", KILL, "running", "running"),
    Case("environment", TERM, "running", "running"),
    Case("environment", STOP, "running", "running"),
    Case("environment", KILL, "checkpointing", "running"),
    Case("environment", TERM, "checkpointing", "running"),
    Case("environment", STOP, "checkpointing", "running"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_signal_to_a_service(served, case, row):
    play(served, case, row)
