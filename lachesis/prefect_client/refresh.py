"""Update the records of runs and tests with the states of their flow runs in Prefect."""

from collections.abc import Callable
from typing import Any

from lachesis.base.errors import ServerDownError, StorageError, UnknownRunError
from lachesis.base.json_text import Json
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore
from lachesis.prefect_client import pending_submissions
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.submit import log
from lachesis.runs.end_causes import CAUSES, EndCause
from lachesis.runs.ending import end_run, find_lost_cause, is_elsewhere
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore

# Why a run has ended whose flow run is in one of these states and whose flow has recorded nothing.
_CAUSE_BY_STATE = {
    "PAUSED": EndCause.SUSPENDED,
    "CANCELLED": EndCause.PREFECT,
    "COMPLETED": EndCause.COMPLETED,
    "FAILED": EndCause.FLOW_LOST,
    "CRASHED": EndCause.FLOW_LOST,
}


def refresh_test(tests: InferenceTestStore, test: InferenceTest) -> InferenceTest:
    """Return the test, sent if it is pending, and failed if its flow run left no result."""
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
    instead. It also names living runs of another host, which only that host can check.
    """
    warnings = _list_runs_elsewhere(records)
    records = [
        _refresh_or_keep(record, lambda record: pending_submissions.send_run(store, record))
        for record in records
    ]
    unsettled = [record for record in records if not record.has_ended]
    flow_run_ids = [record.flow_run_id for record in unsettled if record.flow_run_id]
    if not flow_run_ids:
        return records, "; ".join(warnings) or None
    try:
        api = PrefectApi()
        flow_runs = api.read_flow_runs(flow_run_ids)
    except ServerDownError as error:
        return [
            _refresh_or_keep(record, lambda record: _refresh_without_server(store, record))
            for record in records
        ], "; ".join([str(error), *warnings])

    def refresh(record: RunRecord) -> RunRecord:
        flow_run = flow_runs.get(record.flow_run_id or "")
        return _refresh_from_server(store, record, api.url, flow_run)

    refreshed = [_refresh_or_keep(record, refresh) for record in records]
    return refreshed, "; ".join(warnings) or None


def _list_runs_elsewhere(records: list[RunRecord]) -> list[str]:
    return [
        f"run {record.run_id} was begun on {record.host_name}, and only that host knows whether it "
        f"still lives; `lachesis stop {record.run_id}` ends it here if it does not"
        for record in records
        if not record.has_ended and is_elsewhere(record)
    ]


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
    """Return the run, ended if its processes are gone; the server is not asked."""
    if record.has_ended or record.flow_run_id is None or record.status == "pending":
        return record
    cause = find_lost_cause(store.dir(record.run_id), record)
    if cause is None:
        return record
    return _end_run(
        store, record, cause, f"{CAUSES[cause].sentence}; the Prefect server does not respond"
    )


def _refresh_from_server(
    store: RunStore, record: RunRecord, url: str, flow_run: dict[str, Any] | None
) -> RunRecord:
    """Return the run with the state of its flow run."""
    if record.has_ended or record.flow_run_id is None or is_elsewhere(record):
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
    if state["type"] in _CAUSE_BY_STATE:
        if alive:  # Its services are still being ended.
            return record.model_copy(update={"status": "stopping"})
        return _end_run(store, record, *_find_end(store, record, state))
    if state["type"] == "CANCELLING":
        return record.model_copy(update={"status": "stopping"})
    return record


def _find_end(store: RunStore, record: RunRecord, state: Json) -> tuple[EndCause, str | None]:
    """Return why a run has ended whose flow run has, and whose flow has not recorded it."""
    cause = _CAUSE_BY_STATE[state["type"]]
    if cause is EndCause.COMPLETED and not _has_all_steps(store, record):
        # A person has set the state, or the flow was killed after it.
        return EndCause.PREFECT, "marked as completed in Prefect before its last step"
    if CAUSES[cause].status == "failed":
        lost_cause = find_lost_cause(store.dir(record.run_id), record) or cause
        return lost_cause, state.get("message") or None
    return cause, None


def _has_all_steps(store: RunStore, record: RunRecord) -> bool:
    newest = Checkpoints(store.dir(record.run_id).checkpoints).find_newest()
    return newest is not None and newest.is_final and newest.step >= record.total_steps


def _end_run(
    store: RunStore, record: RunRecord, cause: EndCause, sentence: str | None
) -> RunRecord:
    """Record how a run ended; if the disk is full, return the updated record without saving it."""
    error = record.error or sentence
    try:
        return end_run(store, record, cause, error)
    except StorageError as problem:
        log.warning("the end of run %s cannot be written: %s", record.run_id, problem)
        status = CAUSES[cause].status
        fields = {"status": status, "phase": status, "end_cause": cause, "error": error}
        return record.model_copy(update=fields)
