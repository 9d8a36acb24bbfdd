"""Runs on disk for the tests of the tick, and processes that end with each test."""

import contextlib
from typing import Any

import pytest

from lachesis.base.timestamps import now_iso
from lachesis.config import run_config as run_config
from lachesis.prefect_client import stop
from lachesis.runs.store import RunStore
from tests.harness.home import write_run
from tests.monitor.tick.runs import STARTED, Asked


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path)


@pytest.fixture
def asked(monkeypatch):
    """What was asked to end, and why; asking is not the tick's own work."""
    requests: Asked = []
    monkeypatch.setattr(
        stop,
        "cancel_run",
        lambda store, record, cause, reason: requests.append((record.run_id, reason)),
    )
    return requests


@pytest.fixture
def make(store):
    """A run that trains; its lock is held until the test ends."""
    with contextlib.ExitStack() as held:

        def run(run_id="0123abcd", limits=None, *, alive=True, **changes):
            values: dict[str, Any] = {
                "total_steps": 100,
                "started_at": now_iso(),
                "status": "running",
                "phase": "training",
                "flow_run_id": "f",
                "prefect_api_url": "http://127.0.0.1:1/api",
            }
            edits = {"limits": limits or {}}
            record = write_run(store, edits=edits, run_id=run_id, **{**values, **changes})
            if alive:
                held.enter_context(store.dir(run_id).hold_alive_lock())
            return record

        yield run


@pytest.fixture(autouse=True)
def ended():
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()
