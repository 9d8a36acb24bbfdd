"""The cases that `make test` plays too: what dies is started again, or resumed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.signals import KILL, Case, play
from tests.faults.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
CASES = [
    Case("environment", KILL, "running", "running"),
    Case("flow", KILL, "running", "failed", "-9", resume=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_signal(world: World, case: Case, row: Callable[..., None]) -> None:
    play(world, case, row)
