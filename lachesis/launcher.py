"""Start and stop runs as Prefect flow runs, and find the server or start one. The only place that knows the deployment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lachesis import paths
from lachesis.errors import ProcessExitedError, RunStateError, ServerDownError
from lachesis.prefect_api import PrefectApi, api_url, server_file
from lachesis.runs import RunRecord, RunStore, Status

FLOW, DEPLOYMENT = "launch-training", "local"

_STATUS: dict[str, Status] = {
    "SCHEDULED": "pending",
    "PENDING": "starting",
    "CANCELLING": "stopping",
    "CANCELLED": "stopped",
    "COMPLETED": "completed",
    "FAILED": "failed",
    "CRASHED": "failed",
}
"""Prefect's state types. RUNNING is not here: the record tells starting from running."""


def submit(store: RunStore, record: RunRecord) -> RunRecord:
    """Schedule the run; the same run and attempt is scheduled once. Raises ServerDownError."""
    api = PrefectApi()
    deployment = api.deployment(FLOW, DEPLOYMENT)
    if deployment is None:
        raise ServerDownError(
            f"the Prefect server at {api.url} has no deployment {FLOW}/{DEPLOYMENT}; start the runner with `lachesis serve`"
        )
    flow_run = api.create_run(
        deployment["id"],
        name=f"{record.environment}-{record.run_id}",
        parameters={"run_id": record.run_id, "home": str(store.home)},
        tags=["lachesis", f"run:{record.run_id}", f"environment:{record.environment}"],
        key=f"{record.run_id}-{record.attempt}",
    )
    return store.update(record.run_id, flow_run_id=flow_run["id"], prefect_api_url=api.url)


def refresh(store: RunStore, record: RunRecord) -> RunRecord:
    """The record with its status as the server has it. When the server is away, the flow's process is looked at instead."""
    if record.ended or record.flow_run_id is None:
        return record
    try:
        api = PrefectApi()
        flow_run = api.flow_run(record.flow_run_id)
    except ServerDownError:
        if record.flow_pid is not None and not _alive(record.flow_pid):
            return store.update(record.run_id, status="failed", phase="failed", error="its flow process is gone")
        return record
    if flow_run is None and api.url != record.prefect_api_url:
        return record  # another server
    state = (flow_run or {}).get("state") or {"type": "CRASHED", "message": "the server does not know this flow run any more"}
    status = _STATUS.get(state["type"])
    if status is None or status == record.status or (status in ("pending", "starting") and record.started_at):
        return record
    if status in ("failed", "stopped", "completed"):
        if record.flow_pid is not None and _alive(record.flow_pid):
            return record.model_copy(update={"status": "stopping"})  # it is still ending its services
        error = record.error or (state.get("message") if status == "failed" else None)
        return store.update(record.run_id, status=status, phase=status, error=error)
    return record.model_copy(update={"status": status})


def cancel(store: RunStore, record: RunRecord) -> None:
    """Ask the flow to end. Without the server the flow's process is told directly, which ends it the same way."""
    if record.flow_run_id is None:
        store.update(record.run_id, status="stopped", phase="stopped")
        return
    try:
        PrefectApi().cancel(record.flow_run_id, "stopped by its user")
    except ServerDownError:
        if record.flow_pid is None or not _alive(record.flow_pid):
            raise
        os.kill(record.flow_pid, signal.SIGTERM)


def wait_gone(record: RunRecord, timeout_s: float = 30.0) -> bool:
    """Wait until the flow's process has told the server how the run ended and is gone."""
    return wait_for(lambda: record.flow_pid is None or not _alive(record.flow_pid), timeout_s)


def ui_url(record: RunRecord) -> str | None:
    """The run's page, at the server that runs now or else the one that ran it."""
    url = api_url() or record.prefect_api_url
    if not url or not record.flow_run_id:
        return None
    return f"{url.removesuffix('/api')}/runs/flow-run/{record.flow_run_id}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # a zombie whose parent has not looked yet is dead
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return True


def running_server() -> dict[str, Any] | None:
    """The launcher that runs in this home, or None. `$PREFECT_API_URL` names a server of the user's own."""
    url = os.environ.get("PREFECT_API_URL")
    if url:
        return {"api_url": url, "ui_url": url.removesuffix("/api"), "pid": None}
    try:
        found: dict[str, Any] = json.loads(server_file().read_text())
    except (OSError, ValueError):
        return None
    return found if _alive(found["pid"]) and PrefectApi(found["api_url"]).healthy() else None


def serve_command(*options: str) -> list[str]:
    return [sys.executable, "-m", "deployments.up", *options]


class Serving:
    """A launcher of our own for as long as the block lasts; also when this process is killed."""

    def __init__(self, timeout_s: float = 180.0) -> None:
        self.timeout_s = timeout_s

    def __enter__(self) -> Self:
        log = paths.home() / "logs" / "launcher.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                serve_command("--until-stdin-closes"),
                cwd=paths.checkout(),
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        try:
            self._wait(log)
        except BaseException:
            self._end()
            raise
        return self

    def _wait(self, log: Path) -> None:
        until = time.monotonic() + self.timeout_s
        while not (server_file().is_file() and running_server()):
            if self.process.poll() is not None:
                raise ProcessExitedError(f"the launcher exited with code {self.process.returncode}:\n{log.read_text()}")
            if time.monotonic() > until:
                raise RunStateError(f"the launcher is not ready after {self.timeout_s:.0f} s, see {log}")
            time.sleep(0.1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until the condition holds; False when the time is over."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.25)
    return True
