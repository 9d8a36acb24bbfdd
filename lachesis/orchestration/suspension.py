"""Runs that were suspended on their page in Prefect.

A suspended run is stopped with a checkpoint. Its flow run stays suspended, and is the one that goes
on when somebody resumes it, on that page or by `lachesis resume`; so two of them give one attempt.
"""

from __future__ import annotations

from lachesis.base.json_text import Json
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.runs.run_record import RunRecord
from lachesis.runs.store import RunStore

SUSPENDED = "suspended in Prefect"
"""The stop reason of a run whose flow run waits to be resumed."""
WAITING_STATES = frozenset({"SCHEDULED", "PENDING"})
"""Types of the states in which a flow run waits for its process."""
_SUSPENDED_MESSAGE = "training stops with a checkpoint; Resume goes on from it"


def is_suspended(record: RunRecord) -> bool:
    """Return whether the attempt was ended, or is being ended, by a suspension."""
    return record.stop_reason == SUSPENDED


def describe_suspension(run_id: str) -> str:
    """Return what the record of a suspended run gives as the reason of its end."""
    return f"{SUSPENDED}; Resume on its page, or `lachesis resume {run_id}`, goes on with it"


def record_suspension(store: RunStore, record: RunRecord) -> RunRecord:
    """Write into the record that this attempt was suspended, unless it had a reason to end before."""
    if record.stop_reason is not None:
        return record
    changes = {"stop_reason": SUSPENDED, "resume_wanted": False}
    return store.update(record.run_id, if_attempt=record.attempt, **changes)


def record_not_resumable(store: RunStore, record: RunRecord, reason: str) -> RunRecord:
    """Write into the record of a suspended run that its flow run cannot be resumed any more, and
    why.
    """
    suspension_text = describe_suspension(record.run_id)
    error = (record.error or suspension_text).replace(suspension_text, reason)
    return store.update(record.run_id, if_attempt=record.attempt, stop_reason=reason, error=error)


def remove_pause_timeout(api: PrefectApi, flow_run_id: str) -> bool:
    """Let a flow run that is paused now stay suspended until somebody resumes it.

    The dialog in Prefect gives every suspension a time limit, 5 minutes if nobody changes it, after
    which the flow run fails and cannot be resumed. A pause without `pause_reschedule` expects a
    process that waits, which there is none of. The state is read here, at the last moment, because
    a resume since an earlier look must not be overwritten.

    Returns:
        Whether it is paused.

    Raises:
        ServerDownError: The server does not answer.
    """
    state = (api.read_flow_run(flow_run_id) or {}).get("state") or {}
    if state.get("type") != "PAUSED":
        return False
    details = state.get("state_details") or {}
    if details.get("pause_timeout") or not details.get("pause_reschedule"):
        api.suspend(flow_run_id, _SUSPENDED_MESSAGE)
    return True


def find_flow_run_to_resume(record: RunRecord) -> Json | None:
    """Return the run's flow run when a resume goes on with it, or None when it needs a new one.

    A flow run that was stopped first and suspended then is cancelled: Prefect's runner may be at
    its cancellation still, and would end the process of whoever resumes it.

    Raises:
        ServerDownError: It cannot be asked about.
    """
    api = PrefectApi()
    flow_run = api.read_flow_run(record.flow_run_id) if record.flow_run_id else None
    state = ((flow_run or {}).get("state") or {}).get("type")
    if state == "PAUSED" and record.stop_reason and not is_suspended(record):
        api.cancel(str(record.flow_run_id), record.stop_reason)
        return None
    is_resumed = state in WAITING_STATES or (state == "RUNNING" and is_suspended(record))
    return flow_run if is_resumed or state == "PAUSED" else None


def resume_flow_run(flow_run: Json) -> bool:
    """Resume a suspended flow run. Return False when Prefect refuses. Raises ServerDownError."""
    if flow_run["state"]["type"] != "PAUSED":
        return True  # somebody else has resumed it
    api = PrefectApi()
    remove_pause_timeout(api, str(flow_run["id"]))
    if api.resume(str(flow_run["id"])):
        return True
    state = ((api.read_flow_run(str(flow_run["id"])) or {}).get("state") or {}).get("type")
    return state in WAITING_STATES or state == "RUNNING"
