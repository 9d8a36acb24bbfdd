"""Go on with a run that has ended, as a new attempt from its newest checkpoint."""

from __future__ import annotations

from typing import Any

from lachesis.base.errors import ServerDownError
from lachesis.orchestration import launcher
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.orchestration.suspension import find_flow_run_to_resume, is_suspended, resume_flow_run
from lachesis.runs.store import RunRecord, RunStore, get_attempt_duration_s, now_iso


def make_next_attempt_changes(record: RunRecord) -> dict[str, Any]:
    """What changes in the record of a run that goes on from its newest checkpoint."""
    return {
        "status": "pending",
        "phase": "queued",
        "error": None,
        "stop_reason": None,
        "resume_wanted": False,
        "resumed": None,
        "health": None,
        "attempt": record.attempt + 1,
        "services": {},
        "started_at": None,
        "ended_at": None,
        "earlier_hours": record.earlier_hours
        + (get_attempt_duration_s(record) / 3600 if record.has_ended else 0.0),
        "began_s": None,
        "boot": None,
        "took_s": None,
        "queued_at": now_iso(),
        # the flow run of the attempt before it has ended, which says nothing about this one
        "flow_run_id": None,
        "flow_pid": None,
    }


def resubmit_run(store: RunStore, record: RunRecord, **changes: Any) -> RunRecord:
    """Continue an ended run from its newest checkpoint, as a new attempt.

    A suspended flow run is resumed, any other one has ended and a new one is submitted. Of several
    calls at once, and of a resume in Prefect meanwhile, one makes the attempt, and all have its
    run.

    Args:
        store: The runs of this home.
        record: The run.
        changes: What changes in its record besides.

    Raises:
        ServerDownError: The record is then as it was.
    """
    flow_run = find_flow_run_to_resume(record)
    if flow_run is not None and flow_run["state"]["type"] == "RUNNING":
        return store.load(record.run_id)  # resumed in Prefect; its flow makes the attempt
    attempt_changes = {
        **make_next_attempt_changes(record),
        "flow_run_id": flow_run and record.flow_run_id,
    }
    queued_record = store.update(
        record.run_id, if_attempt=record.attempt, **attempt_changes, **changes
    )
    if (
        queued_record.attempt != attempt_changes["attempt"]
        or queued_record.queued_at != attempt_changes["queued_at"]
    ):
        return queued_record
    try:
        if flow_run is not None:
            if resume_flow_run(flow_run):
                return queued_record
            queued_record = store.update(record.run_id, flow_run_id=None)
        return launcher.submit_run(store, queued_record)
    except BaseException:
        store.update(record.run_id, **record.model_dump(include={*attempt_changes, *changes}))
        raise


def needs_new_attempt(record: RunRecord) -> bool:
    """Return whether a flow run that starts now has to make a new attempt of the run.

    It is so when a flow has begun this attempt before, and when the attempt was suspended before it
    could begin: then Prefect starts the flow run again by a retry or a resume.
    """
    return record.started_at is not None or is_suspended(record)


def belongs_to_attempt(record: RunRecord, flow_run_id: str | None) -> bool:
    """Return whether this flow run belongs to the run's attempt, or was started in Prefect by hand.

    A flow run that cannot be asked about belongs to it.
    """
    if flow_run_id is None or flow_run_id == record.flow_run_id:
        return True
    try:
        flow_run = PrefectApi().read_flow_run(flow_run_id) or {}
    except ServerDownError:
        return True
    return flow_run.get("idempotency_key") == f"{record.run_id}-{record.attempt}"
