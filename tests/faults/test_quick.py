"""The cases that `make test` plays too; `tests/e2e/test_lifecycle.py` and `tests/trainer/test_exact_resume.py` resume runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lachesis.invalid_groups import BATCHES
from lachesis.monitor.tick import Monitor
from tests.faults.signals import KILL, Case, play
from tests.faults.world import EDITS, World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.fault]
Row = Callable[..., None]
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


@pytest.mark.matrix
def test_a_verifier_that_always_raises_ends_the_run(world: World, row: Row) -> None:
    """After the groups of three batches, with the reason; no policy starts it again."""
    edits = {"mode": "raises", "pause_s": 0.01, "limits.on_crash": "resume"}
    run = world.start(**edits)
    began = time.monotonic()
    record = run.ended(150)
    assert (record.status, record.attempt) == ("failed", 1)
    assert "of steady were invalid, most often by: KeyError at steady.py:" in (record.error or "")
    assert f"`lachesis env check {record.environment_file}`" in (record.error or "")
    assert str(run.dir.log("environment")) in (record.error or "")
    groups = int((record.error or "").split()[4])
    assert groups >= BATCHES * EDITS["batch_size"] // EDITS["group_size"]
    assert not run.steps()
    Monitor(world.store).tick()
    assert run.seen().status == "failed"
    row(
        fault="a verifier that always raises",
        phase="running",
        expected="failed with the reason",
        seen=f"after {time.monotonic() - began:.0f} s and {groups} groups",
    )
