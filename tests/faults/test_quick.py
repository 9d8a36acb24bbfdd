"""The case that `make test` plays too; `tests/e2e/test_lifecycle.py` and `tests/trainer/test_exact_resume.py` resume runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.signals import KILL, Case, play
from tests.faults.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.fault]
CASES = [
    Case("environment", KILL, "running", "running"),
]


@pytest.fixture(scope="module")
def world(served_home: Path) -> Iterator[World]:
    """In the home of the end-to-end tests, so that no further launcher is needed."""
    made = World(served_home, served=True)
    yield made
    made.current = None
    made.end_all_runs()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_signal(world: World, case: Case, row: Callable[..., None]) -> None:
    play(world, case, row)
