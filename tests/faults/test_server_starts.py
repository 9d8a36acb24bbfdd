"""A home that has been served for weeks starts again without a word in the server's log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from lachesis.orchestration.server_info import find_api_url
from tests.faults.world import World
from tests.served import share_schemas

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.matrix]
NUM_TICKS, EVENTS_PER_TICK, LINES_PER_TICK = 2000, 10, 5
NUM_STARTS = 10
# After this time all services of the server have looked once, and a tick has ended.
SETTLE_S = 15.0
BATCH = 100


@pytest.fixture
def old_world(
    tiny_model: Path, schemas: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A home of its own, whose server has recorded many ticks of the monitor."""
    (tmp_path / "models").symlink_to(tiny_model / "models")
    share_schemas(tmp_path, schemas)
    monkeypatch.setenv("LACHESIS_HOME", str(tmp_path))
    world = World(tmp_path)
    world.serve()
    record_ticks()
    yield world
    world.stop_serving()


def record_ticks() -> None:
    """Record ticks of the last two days, with their log lines and events."""
    now = datetime.now(UTC)
    with httpx.Client(base_url=find_api_url(), timeout=60, trust_env=False) as client:

        def post(path: str, body: Any) -> Any:
            for _ in range(20):
                response = client.post(path, json=body)
                if response.status_code != 503:
                    break
            response.raise_for_status()
            return response.json() if response.content else None

        deployment = client.get("/deployments/name/monitor-training/local").json()
        lines: list[Any] = []
        events: list[Any] = []
        for number in range(NUM_TICKS):
            at = (now - timedelta(days=2) * (1 - number / NUM_TICKS)).isoformat()
            tick = post(
                "/flow_runs/",
                {
                    "flow_id": deployment["flow_id"],
                    "deployment_id": deployment["id"],
                    "state": {"type": "COMPLETED", "name": "Completed", "timestamp": at},
                },
            )
            lines += LINES_PER_TICK * [
                {"name": "lachesis", "level": 20, "message": "a line", "timestamp": at}
                | {"flow_run_id": tick["id"]}
            ]
            events += [
                {
                    "id": str(uuid4()),
                    "occurred": at,
                    "event": "lachesis.run.tick",
                    "resource": {"prefect.resource.id": f"prefect.flow-run.{tick['id']}"},
                    "payload": {},
                }
                for _ in range(EVENTS_PER_TICK)
            ]
            if (number + 1) % BATCH == 0:
                post("/logs/", lines)
                post("/events", events)
                lines, events = [], []


def test_no_start_finds_the_database_locked(old_world: World, row: Callable[..., None]) -> None:
    """The monitor's first tick, which removes old ones, is part of each start."""
    log = old_world.home / "logs" / "server.log"
    locked = []
    for _ in range(NUM_STARTS):
        old_world.stop_serving()
        old_world.serve(LACHESIS_MONITOR_INTERVAL_S="5")
        time.sleep(SETTLE_S)
        text = log.read_text(errors="replace")
        locked.append(text.count("database is locked"))
        assert "Traceback" not in text, text[text.index("Traceback") :][:3000]
    assert locked == NUM_STARTS * [0]
    row(
        fault=f"{NUM_STARTS} starts with {NUM_TICKS} ticks",
        phase="serving",
        expected="no database is locked",
        seen="none",
    )
