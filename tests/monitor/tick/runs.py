"""A run that trains, and an environment that stands still, for the tests of the tick."""

import json
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from lachesis.config import run_config as run_config
from lachesis.prefect_client import submit
from lachesis.runs.record import ServiceRecord
from lachesis.runs.store import RunStore
from tests.harness.waiting import wait_until

Asked = list[tuple[str, str]]


def without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a resume of a run whose flow run has ended do everything but submit it."""
    monkeypatch.setattr(submit, "submit_run", lambda store, record: record)


STARTED: list[subprocess.Popen[bytes]] = []
"""Processes that a test has started."""


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that `ended` ends after the test."""
    STARTED.append(subprocess.Popen(command, **options))
    return STARTED[-1]


def frozen(store: RunStore, run_id: str) -> None:
    """The environment has stood still for two minutes, with its last beat."""
    about = {"written_at": time.time() - 120, "last_group_at": time.time() - 120, "errors": {}}
    store.dir(run_id).get_counters_file("environment").write_text(json.dumps(about))
    process = start([sys.executable, "-c", "import time; time.sleep(600)"])
    process.send_signal(19)
    store.update(
        run_id, services={"environment": ServiceRecord(pid=process.pid, log="x", state="running")}
    )
    wait_until(lambda: psutil.Process(process.pid).status() == "stopped", 20, poll_s=0.02)
