"""A real Prefect server, and our runner with one small flow, for tests that need no launcher."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from deployments.serve import PREFECT_SETTINGS
from lachesis.base.errors import ServerDownError
from lachesis.prefect_client.background_serve import READY_LINE
from lachesis.prefect_client.resources import PrefectApi
from lachesis.supervision.services.ports import reserve_free_ports
from tests.harness.waiting import call_again, wait_until

ROOT = Path(__file__).resolve().parents[2]
WORK_S, LINGER_S = 1.5, 4.0
# A flow whose process takes a while to exit after it has completed, as one that trains does.
FLOW = """
import atexit, time
from prefect import flow

@flow
def linger(text: str = "") -> None:
    atexit.register(time.sleep, {linger_s})
    time.sleep({work_s})
"""
RUNNER = """
import asyncio, sys
from prefect.deployments.runner import RunnerDeployment
from deployments import runner

linger = RunnerDeployment.from_entrypoint("lingering.py:linger", name="test")
runner.make_pools = lambda: [runner.DeploymentPool([linger], 2)]
sys.exit(asyncio.run(runner.main()))
"""


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of Prefect without content, made once for all workers of a test run: its hundred
    migrations take eight seconds of a core.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "prefect"
    command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
    env = {**os.environ, **PREFECT_SETTINGS, "PREFECT_HOME": str(folder)}
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
    assert [file.name for file in folder.glob("*.db*")] == ["prefect.db"]
    return folder / "prefect.db"


def give_database(prefect_home: Path, empty_database: Path) -> None:
    """Let a server that starts in this home find its tables."""
    prefect_home.mkdir(exist_ok=True)
    shutil.copy(empty_database, prefect_home)


@contextlib.contextmanager
def serve_prefect(home: Path) -> Iterator[PrefectApi]:
    """Run a server with its database in `home`, and yield a client."""
    port = reserve_free_ports(1)[0]
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
    env = {**os.environ, **PREFECT_SETTINGS, "PREFECT_HOME": str(home)}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=env, stdout=log, stderr=log, start_new_session=True
        )
    api = PrefectApi(f"http://127.0.0.1:{port}/api")
    wait_until(api.is_healthy, 120, process=process, log=home / "log")
    try:
        yield api
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def run_lingering_flow_runner(
    api: PrefectApi, folder: Path, changes: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `deployments.runner` with the deployment `linger/test` alone, until it is ready.

    Args:
        api: The server.
        folder: Where the flow's file, the home of Prefect and the log are written.
        changes: Python code that the runner's process executes first.
    """
    (folder / "lingering.py").write_text(FLOW.format(work_s=WORK_S, linger_s=LINGER_S))
    env = {**os.environ, **PREFECT_SETTINGS, "PREFECT_API_URL": api.url}
    env |= {"PREFECT_HOME": str(folder / "runner"), "PYTHONPATH": str(ROOT)}
    log_file = folder / "runner.log"
    log_file.touch()
    num_starts = log_file.read_text().count(READY_LINE)
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", changes + RUNNER], cwd=folder, env=env, stdout=log, stderr=log
        )
    wait_until(
        lambda: log_file.read_text().count(READY_LINE) > num_starts,
        60,
        process=process,
        log=log_file,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.wait(60)


def read_state(api: PrefectApi, flow_run_id: str) -> str:
    """Return the type of a flow run's state; a busy server is asked again."""
    flow_run = call_again(lambda: api.read_flow_run(flow_run_id) or {}, ServerDownError)
    return str(flow_run["state"]["type"])


def end_runner_around_completion(api: PrefectApi, folder: Path, pause_s: float) -> list[str]:
    """End a runner `pause_s` after a flow run of it has begun; return the states that were seen.

    The flow runs for `WORK_S`, and its process lives for `LINGER_S` after the completion.
    """
    states: list[str] = []

    def watch_state(flow_run_id: str, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        while time.monotonic() < until:
            state = read_state(api, flow_run_id)
            if [state] != states[-1:]:
                states.append(state)
            time.sleep(0.02)

    with run_lingering_flow_runner(api, folder) as runner:
        deployment: Any = api._request("GET", "/deployments/name/linger/test")
        flow_run = api.create_flow_run(
            deployment["id"], name="linger", parameters={}, tags=[], key=str(time.time_ns())
        )
        log = folder / "runner.log"
        wait_until(lambda: watch_state(flow_run["id"], 0.1) or "RUNNING" in states, 60, log=log)
        watch_state(flow_run["id"], pause_s)
        runner.terminate()
        wait_until(
            lambda: watch_state(flow_run["id"], 0.1) or runner.poll() is not None, 60, log=log
        )
        assert runner.returncode == 0, log.read_text()
    watch_state(flow_run["id"], 0.1)
    return states
