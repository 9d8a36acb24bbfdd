"""Update the records of runs and tests with the states of their flow runs in Prefect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lachesis.base.errors import ServerDownError, StorageError, UnknownRunError
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore
from lachesis.prefect_client import pending_submissions
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.submit import log
from lachesis.runs.record import RunRecord, RunStatusName
from lachesis.runs.store import RunStore

# The run status for each of Prefect's state types except RUNNING, for which the record knows more.
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


def refresh_test(tests: InferenceTestStore, test: InferenceTest) -> InferenceTest:
    """Return the test, sent again if it is pending, and marked as failed if its flow run has ended
    without a result.
    """
    test = pending_submissions.send_test(tests, test)
    flow_run_id = tests.read_flow_run_id(test.test_id)
    if test.has_ended or flow_run_id is None:
        return test
    try:
        state = (PrefectApi().read_flow_run(flow_run_id) or {}).get("state") or {"type": "CRASHED"}
    except ServerDownError:
        return test  # The test's flow records its end by itself.
    if state["type"] not in ("FAILED", "CRASHED", "CANCELLED"):
        return test
    message = state.get("message") or "no reason given"
    reason = f"its flow run ended as {state['type'].lower()}: {message}"
    return tests.fail(test.test_id, reason)


def refresh_run(store: RunStore, record: RunRecord) -> RunRecord:
    """Return the record with the status that the server reports."""
    return refresh_runs(store, [record])[0][0]


def refresh_runs(store: RunStore, records: list[RunRecord]) -> tuple[list[RunRecord], str | None]:
    """Return the records with the statuses that the server reports, and a warning or None.

    If the server does not respond, the warning says so, and the processes of each run are checked
    instead.
    """
    records = [
        _refresh_or_keep(record, lambda record: pending_submissions.send_run(store, record))
        for record in records
    ]
    unsettled = [record for record in records if not record.has_ended]
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

    def refresh(record: RunRecord) -> RunRecord:
        flow_run = flow_runs.get(record.flow_run_id or "")
        return _refresh_from_server(store, record, api.url, flow_run)

    return [_refresh_or_keep(record, refresh) for record in records], None


def _refresh_or_keep(record: RunRecord, refresh: Callable[[RunRecord], RunRecord]) -> RunRecord:
    """Return the refreshed record, or the record itself if its folder is gone or not writable.

    One damaged run must not hide the others.
    """
    try:
        return refresh(record)
    except (StorageError, UnknownRunError) as error:
        log.warning("run %s: %s", record.run_id, error)
        return record


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
        record.error or "its flow is gone, and the Prefect server does not respond",
    )


def _refresh_from_server(
    store: RunStore, record: RunRecord, url: str, flow_run: dict[str, Any] | None
) -> RunRecord:
    if record.has_ended or record.flow_run_id is None:
        return record
    if flow_run is None and url != record.prefect_api_url:
        return record  # The run belongs to another server.
    alive = store.dir(record.run_id).is_alive()
    if flow_run is None and alive:
        return record  # The server has lost its database, but the run is alive.
    state = (flow_run or {}).get("state") or {
        "type": "CRASHED",
        "message": "the server no longer knows this flow run",
    }
    status = _STATUS_BY_STATE.get(state["type"])
    if status in ("failed", "stopped", "completed"):
        if alive:  # Its services are still being ended.
            return record.model_copy(update={"status": "stopping"})
        return _end_run(
            store,
            record,
            status,
            record.error or (state.get("message") if status == "failed" else None),
        )
    if status is None or (status in ("pending", "starting") and record.status != "pending"):
        return record
    return record.model_copy(update={"status": status})


def _end_run(
    store: RunStore, record: RunRecord, status: RunStatusName, error: str | None
) -> RunRecord:
    """Record how a run ended; if the disk is full, return the updated record without saving it."""
    try:
        return store.mark_ended(record.run_id, status, error, if_attempt=record.attempt)
    except StorageError as problem:
        log.warning("the end of run %s cannot be written: %s", record.run_id, problem)
        return record.model_copy(update={"status": status, "phase": status, "error": error})
