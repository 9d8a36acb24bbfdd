"""Start and stop runs as Prefect flow runs, and find the server or start one. The only place that
knows the deployment.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from lachesis.base import paths
from lachesis.base.errors import (
    ProcessExitedError,
    RunStateError,
    ServerDownError,
    StorageError,
    UnknownRunError,
)
from lachesis.base.files import storage_errors
from lachesis.config.run_config import read_env_number
from lachesis.orchestration.prefect_api import (
    PrefectApi,
    find_api_url,
    read_server_info,
    server_file,
)
from lachesis.orchestration.suspension import (
    SUSPENDED,
    WAITING_STATES,
    describe_suspension,
    is_suspended,
    record_not_resumable,
    record_suspension,
    remove_pause_timeout,
)
from lachesis.runs import leftovers
from lachesis.runs.store import RunRecord, RunStatusName, RunStore, seconds_between
from lachesis.validation.tests import InferenceTest, InferenceTestStore

log = logging.getLogger(__name__)
TRAINING_FLOW = "launch-training"
TEST_FLOW = "validate-environment"
MONITOR_FLOW = "monitor-training"
NIGHTLY_FLOW = "validate-all-environments"
SUBMIT_TIMEOUT_S = 120.0
"""Longer than any submission takes."""
STOPPED_BY_USER = "stopped by its user"
READY_LINE = "runner is ready"
"""What the runner prints when it takes runs."""

_STATUS_BY_STATE: dict[str, RunStatusName] = {
    "SCHEDULED": "pending",
    "PENDING": "pending",
    "PAUSED": "stopped",
    "CANCELLING": "stopping",
    "CANCELLED": "stopped",
    "COMPLETED": "completed",
    "FAILED": "failed",
    "CRASHED": "failed",
}
"""Prefect's state types. RUNNING is not here: the record tells starting from running."""


def get_deployment_name(home: Path) -> str:
    """`local`; at a server of the user's own, which other homes may share, one name per home. A
    flow has it from its runner, which tells it the address of its own server too.
    """
    configured_name = os.environ.get("LACHESIS_DEPLOYMENT")
    if configured_name or not os.environ.get("PREFECT_API_URL"):
        return configured_name or "local"
    return f"local-{hashlib.sha256(f'{socket.gethostname()}:{home}'.encode()).hexdigest()[:8]}"


def submit_run(store: RunStore, record: RunRecord) -> RunRecord:
    """Schedule the run; the same run and attempt is scheduled once. Raises ServerDownError."""
    url, flow_run_id = schedule_flow_run(
        TRAINING_FLOW,
        store.home,
        name=f"{record.environment}-{record.run_id}",
        parameters={"run_id": record.run_id, "home": str(store.home)},
        tags=["lachesis", f"run:{record.run_id}", f"environment:{record.environment}"],
        key=f"{record.run_id}-{record.attempt}",
    )
    return store.update(record.run_id, flow_run_id=flow_run_id, prefect_api_url=url)


def schedule_flow_run(
    flow: str, home: Path, *, name: str, parameters: dict[str, Any], tags: list[str], key: str
) -> tuple[str, str]:
    """Schedule a run of a deployment of this home; the server's address and the flow run's id.
    Raises ServerDownError.
    """
    api, deployment = find_deployment(flow, home)
    return api.url, str(
        api.create_flow_run(deployment["id"], name=name, parameters=parameters, tags=tags, key=key)[
            "id"
        ]
    )


def submit_test(tests: InferenceTestStore, test: InferenceTest) -> None:
    """Schedule the inference test. Raises ServerDownError."""
    _, flow_run_id = schedule_flow_run(
        TEST_FLOW,
        tests.home,
        name=f"test-{test.request.environment}-{test.test_id}",
        parameters={"test_id": test.test_id, "home": str(tests.home)},
        tags=["lachesis", f"test:{test.test_id}", f"environment:{test.request.environment}"],
        key=f"test-{test.test_id}",
    )
    tests.save_flow_run_id(test.test_id, flow_run_id)


def refresh_test(tests: InferenceTestStore, test: InferenceTest) -> InferenceTest:
    """The test, ended as failed when its flow run was never submitted or ended without a word."""
    flow_run_id = tests.read_flow_run_id(test.test_id)
    if test.has_ended or flow_run_id is None:
        is_overdue = seconds_between(test.created_at) > SUBMIT_TIMEOUT_S
        never_submitted = "it was never submitted, as what started it was killed; start it again"
        return (
            tests.fail(test.test_id, never_submitted) if is_overdue and not test.has_ended else test
        )
    try:
        state = (PrefectApi().read_flow_run(flow_run_id) or {}).get("state") or {"type": "CRASHED"}
    except ServerDownError:
        return test  # the test writes its own end
    if state["type"] not in ("FAILED", "CRASHED", "CANCELLED"):
        return test
    reason = f"its flow run ended as {state['type'].lower()}: {state.get('message') or 'no reason given'}"
    return tests.fail(test.test_id, reason)


def refresh_run(store: RunStore, record: RunRecord) -> RunRecord:
    """The record with its status as the server has it."""
    return refresh_runs(store, [record])[0][0]


def refresh_runs(store: RunStore, records: list[RunRecord]) -> tuple[list[RunRecord], str | None]:
    """The records with their statuses as the server has them, and what is wrong when it does not
    answer: then what lives of each run is looked at instead.
    """
    records = [
        _refresh_or_keep(record, lambda record: _end_if_never_submitted(store, record))
        for record in records
    ]
    unsettled = [record for record in records if not record.has_ended or is_suspended(record)]
    flow_run_ids = [record.flow_run_id for record in unsettled if record.flow_run_id]
    if not flow_run_ids:
        return records, None
    try:
        api = PrefectApi()
        flow_runs = api.read_flow_runs(flow_run_ids)
    except ServerDownError as error:
        return [
            _refresh_or_keep(record, lambda record: _refresh_without_server(store, record))
            for record in records
        ], str(error)
    return [
        _refresh_or_keep(
            record,
            lambda record: _refresh_from_server(
                store, record, api.url, flow_runs.get(record.flow_run_id or "")
            ),
        )
        for record in records
    ], None


def _refresh_or_keep(record: RunRecord, refresh: Callable[[RunRecord], RunRecord]) -> RunRecord:
    """What is observed, or the record as it is when its folder is gone or cannot be written: one
    damaged run must not hide the others.
    """
    try:
        return refresh(record)
    except (StorageError, UnknownRunError) as error:
        log.warning("run %s: %s", record.run_id, error)
        return record


def _end_if_never_submitted(store: RunStore, record: RunRecord) -> RunRecord:
    """A run whose starter was killed before it could submit it would be pending for ever."""
    if (
        record.has_ended
        or record.flow_run_id
        or record.status != "pending"
        or seconds_between(record.queued_at) < SUBMIT_TIMEOUT_S
    ):
        return record
    never_submitted = "it was never submitted, as what started it was killed; start it again"
    return store.mark_ended(record.run_id, "failed", never_submitted, if_attempt=record.attempt)


def _refresh_without_server(store: RunStore, record: RunRecord) -> RunRecord:
    if (
        record.has_ended
        or record.flow_run_id is None
        or record.status == "pending"
        or store.dir(record.run_id).is_alive()
    ):
        return record
    return _end_run(
        store,
        record,
        "failed",
        record.error or "its flow is gone, and the Prefect server does not answer",
    )


def _refresh_from_server(
    store: RunStore, record: RunRecord, url: str, flow_run: dict[str, Any] | None
) -> RunRecord:
    if record.has_ended or record.flow_run_id is None:
        return _requeue_if_resumed(store, record, flow_run)
    if flow_run is None and url != record.prefect_api_url:
        return record  # another server
    alive = store.dir(record.run_id).is_alive()
    if flow_run is None and alive:
        return record  # the server has lost its database; the run trains on
    state = (flow_run or {}).get("state") or {
        "type": "CRASHED",
        "message": "the server does not know this flow run any more",
    }
    status = _STATUS_BY_STATE.get(state["type"])
    if status in ("failed", "stopped", "completed"):
        if alive:  # its services are still being ended
            return record.model_copy(update={"status": "stopping"})
        if state["type"] == "PAUSED":
            return _end_suspended(store, record)
        return _end_run(
            store,
            record,
            status,
            record.error or (state.get("message") if status == "failed" else None),
        )
    if status is None or (status in ("pending", "starting") and record.status != "pending"):
        return record
    return record.model_copy(update={"status": status})


def _end_suspended(store: RunStore, record: RunRecord) -> RunRecord:
    """End a run that was suspended before it had a process, unless somebody has just resumed it."""
    paused = True
    with contextlib.suppress(ServerDownError):
        paused = remove_pause_timeout(PrefectApi(), record.flow_run_id or "none")
    if not paused:
        return record
    return _end_run(
        store, record_suspension(store, record), "stopped", describe_suspension(record.run_id)
    )


def _requeue_if_resumed(
    store: RunStore, record: RunRecord, flow_run: dict[str, Any] | None
) -> RunRecord:
    """Return the record of an ended run, as one that waits when its suspended flow run was resumed."""
    if flow_run is None or not is_suspended(record):
        return record
    state = str(flow_run["state"]["type"])
    if state in WAITING_STATES or state == "RUNNING":  # its flow has not written its record yet
        return record.model_copy(update={"status": "pending", "phase": "queued", "error": None})
    if state == "PAUSED":
        return record
    reason = f"{SUSPENDED}, where its flow run is {state.lower()} by now"
    return record_not_resumable(store, record, reason)


def _end_run(
    store: RunStore, record: RunRecord, status: RunStatusName, error: str | None
) -> RunRecord:
    """Into the record; on a full disk at least into the answer."""
    try:
        return store.mark_ended(record.run_id, status, error, if_attempt=record.attempt)
    except StorageError as problem:
        log.warning("the end of run %s cannot be written: %s", record.run_id, problem)
        return record.model_copy(update={"status": status, "phase": status, "error": error})


def find_queue_position(store: RunStore, run_id: str) -> dict[str, int] | None:
    """Where a pending run stands while the host runs as many as it may: `place` (1 is next),
    `running` and `limit`; None when nothing is in its way.
    """
    records = store.all()
    limit = get_max_runs()
    running = sum(record.status in ("starting", "running", "stopping") for record in records)
    pending = [record for record in records if record.status == "pending" and record.flow_run_id]
    waiting_ids = [record.run_id for record in sorted(pending, key=lambda record: record.queued_at)]
    if run_id not in waiting_ids:
        return None
    place = waiting_ids.index(run_id) + 1 - max(0, limit - running)  # the first ones start at once
    return {"place": place, "running": running, "limit": limit} if place > 0 else None


def cancel_run(store: RunStore, record: RunRecord, reason: str = STOPPED_BY_USER) -> None:
    """Ask the flow to save a checkpoint and end. Without the server the flow's process is told
    directly, which ends it the same way. The first reason stays.
    """
    if record.flow_run_id is None:
        store.update(record.run_id, stop_reason=reason)  # it may be on its way to the server
        store.mark_ended(record.run_id, "stopped")
        return
    if record.stop_reason is None or is_suspended(record):
        store.update(record.run_id, stop_reason=reason)
    try:
        PrefectApi().cancel(record.flow_run_id, reason)
    except ServerDownError:
        holders = leftovers.find_lock_holders(store.dir(record.run_id).lock)
        flow_process = next(
            (process for process in holders if process.pid == record.flow_pid), None
        )
        if flow_process is None:
            store.update(record.run_id, stop_reason=record.stop_reason)  # nobody was asked
            raise
        with contextlib.suppress(psutil.Error):
            flow_process.terminate()


def cancel_suspended_run(store: RunStore, record: RunRecord) -> None:
    """Cancel the flow run of an ended run if it is suspended, so that nobody resumes it in Prefect.

    Raises:
        ServerDownError: The run stays suspended.
    """
    if is_suspended(record):
        PrefectApi().cancel(record.flow_run_id or "", STOPPED_BY_USER)
        record_not_resumable(store, record, f"{SUSPENDED}, then {STOPPED_BY_USER}")


def wait_until_gone(store: RunStore, record: RunRecord, timeout_s: float = 60.0) -> bool:
    """Wait until no service of the run exists and the flow has told the server how it ended."""

    def is_gone() -> bool:
        if store.dir(record.run_id).is_alive():
            return False
        try:
            state = (PrefectApi().read_flow_run(record.flow_run_id or "none") or {}).get(
                "state"
            ) or {}
        except ServerDownError:
            return True
        return state.get("type") in (None, "COMPLETED", "FAILED", "CRASHED", "CANCELLED", "PAUSED")

    return wait_until(is_gone, timeout_s)


def get_run_url(record: RunRecord) -> str | None:
    """The run's page, at the server that runs now or else the one that ran it."""
    url = find_api_url() or record.prefect_api_url
    if not url or not record.flow_run_id:
        return None
    return f"{url.removesuffix('/api')}/runs/flow-run/{record.flow_run_id}"


def find_running_server() -> dict[str, Any] | None:
    """What the launcher of this home has written about itself, or None when its server does not
    answer.
    """
    server_info = read_server_info()
    return (
        server_info
        if server_info is not None and PrefectApi(server_info["api_url"]).is_healthy()
        else None
    )


def read_max_runs_setting() -> int:
    """Training runs at once on this host, from $LACHESIS_MAX_RUNS; more of them wait in the queue.
    Raises ConfigError.
    """
    return int(read_env_number("LACHESIS_MAX_RUNS", 4, min_value=1))


def read_monitor_interval_s() -> float:
    """Seconds between two looks at all living runs, from $LACHESIS_MONITOR_INTERVAL_S. Raises
    ConfigError.
    """
    return read_env_number("LACHESIS_MONITOR_INTERVAL_S", 60, min_value=15)


def get_max_runs() -> int:
    """Training runs at once, as the launcher of this home was told."""
    server_info = read_server_info()
    return read_max_runs_setting() if server_info is None else int(server_info["max_runs"])


def require_server(home: Path) -> None:
    """Raise ServerDownError unless the Prefect server answers and has the deployments of this home."""
    find_deployment(TRAINING_FLOW, home)


def find_deployment(flow: str, home: Path) -> tuple[PrefectApi, Any]:
    """Return the server and the deployment of this home for a flow. Raises ServerDownError."""
    api, name = PrefectApi(), f"{flow}/{get_deployment_name(home)}"
    deployment = api.read_deployment(flow, get_deployment_name(home))
    if deployment is None:
        raise ServerDownError(
            f"the Prefect server at {api.url} has no deployment {name}; start it with `lachesis serve`"
        )
    return api, deployment


def find_server_problem(home: Path) -> str | None:
    """What is missing for a run to start: the server, or a runner of this home."""
    try:
        api = PrefectApi()
        api.require_healthy()
        if (
            read_server_info() is None
            or api.read_deployment(TRAINING_FLOW, get_deployment_name(home)) is None
        ):
            return f"the Prefect server at {api.url} answers, but no runner of {home} is there; start it with `lachesis serve`"
    except ServerDownError as error:
        return str(error)
    return None


def read_key_names() -> dict[str, str] | None:
    """The names of the keys that the launcher of this home holds, as a mapping for `check_profile`;
    None when none runs. Its children train, so a key in the environment of a command is of no use.
    """
    server_info = read_server_info()
    return None if server_info is None else dict.fromkeys(server_info["keys"], "set")


def make_serve_command(*options: str) -> list[str]:
    return [sys.executable, "-m", "deployments.up", *options]


class LauncherProcess:
    """A launcher of our own for as long as the block lasts; also when this process is killed."""

    def __init__(self, timeout_s: float = 180.0) -> None:
        self.timeout_s = timeout_s

    def __enter__(self) -> Self:
        log = paths.home() / "logs" / "launcher.log"
        with storage_errors(log.parent):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                make_serve_command("--until-stdin-closes"),
                cwd=paths.checkout_dir(),
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(log)
        except BaseException:
            self._stop()
            raise
        return self

    def _wait_until_ready(self, log: Path) -> None:
        until = time.monotonic() + self.timeout_s
        while not (server_file().is_file() and find_running_server()):
            if self.process.poll() is not None:
                raise ProcessExitedError(
                    f"the launcher exited with code {self.process.returncode}:\n{log.read_text()}"
                )
            if time.monotonic() > until:
                raise RunStateError(
                    f"the launcher is not ready after {self.timeout_s:.0f} s, see {log}"
                )
            time.sleep(0.1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until the condition holds; False when the time is over."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.25)
    return True
