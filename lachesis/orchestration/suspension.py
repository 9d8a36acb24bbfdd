"""Handle runs that were suspended on their page in Prefect.

A suspended run is stopped with a checkpoint. Its flow run stays suspended, and continues when it is
resumed on that page or by `lachesis resume`; doing both makes one attempt.
"""

from __future__ import annotations

from lachesis.base.json_text import Json
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.runs.run_record import RunRecord
from lachesis.runs.store import RunStore

# The stop reason of a run whose flow run waits to be resumed.
SUSPENDED = "suspended in Prefect"
# Types of the states in which a flow run waits for its process.
WAITING_STATES = frozenset({"SCHEDULED", "PENDING"})
_SUSPENDED_MESSAGE = "training stops with a checkpoint; Resume continues from it"


def is_suspended(record: RunRecord) -> bool:
    """Return whether the attempt was ended, or is being ended, by a suspension."""
    return record.stop_reason == SUSPENDED


def describe_suspension(run_id: str) -> str:
    """Return the reason for the end in the record of a suspended run."""
    return f"{SUSPENDED}; Resume on its page, or `lachesis resume {run_id}`, continues it"


def record_suspension(store: RunStore, record: RunRecord) -> RunRecord:
    """Record that this attempt was suspended, unless it had another reason to end."""
    if record.stop_reason is not None:
        return record
    changes = {"stop_reason": SUSPENDED, "resume_requested": False}
    return store.update(record.run_id, if_attempt=record.attempt, **changes)


def record_not_resumable(store: RunStore, record: RunRecord, reason: str) -> RunRecord:
    """Record why the flow run of a suspended run can no longer be resumed."""
    suspension_text = describe_suspension(record.run_id)
    error = (record.error or suspension_text).replace(suspension_text, reason)
    return store.update(record.run_id, if_attempt=record.attempt, stop_reason=reason, error=error)


def remove_pause_timeout(api: PrefectApi, flow_run_id: str) -> bool:
    """Let a paused flow run stay suspended until it is resumed.

    The dialog in Prefect gives every suspension a time limit, 5 minutes by default, after which the
    flow run fails and cannot be resumed. A pause without `pause_reschedule` expects a waiting
    process, which does not exist. The state is read here, at the last moment, so that a resume
    meanwhile is not overwritten.

    Returns:
        Whether it is paused.

    Raises:
        ServerDownError: The server does not respond.
    """
    state = (api.read_flow_run(flow_run_id) or {}).get("state") or {}
    if state.get("type") != "PAUSED":
        return False
    details = state.get("state_details") or {}
    if details.get("pause_timeout") or not details.get("pause_reschedule"):
        api.suspend(flow_run_id, _SUSPENDED_MESSAGE)
    return True


def find_flow_run_to_resume(record: RunRecord) -> Json | None:
    """Return the run's flow run if a resume continues it, or None if a new one is needed.

    A flow run that was stopped first and suspended then is cancelled: Prefect's runner may still be
    working on its cancellation, and would end the process of the resumed run.

    Raises:
        ServerDownError: The server does not respond.
    """
    api = PrefectApi()
    if record.flow_run_id:
        flow_run = api.read_flow_run(record.flow_run_id)
    else:
        flow_run = None
    state = ((flow_run or {}).get("state") or {}).get("type")
    if state == "PAUSED" and record.stop_reason and not is_suspended(record):
        api.cancel(str(record.flow_run_id), record.stop_reason)
        return None
    is_resumed = state in WAITING_STATES or (state == "RUNNING" and is_suspended(record))
    if is_resumed or state == "PAUSED":
        return flow_run
    return None


def resume_flow_run(flow_run: Json) -> bool:
    """Resume a suspended flow run; return False if Prefect refuses.

    Raises:
        ServerDownError: The server does not respond.
    """
    if flow_run["state"]["type"] != "PAUSED":
        return True  # Another caller has resumed it.
    api = PrefectApi()
    remove_pause_timeout(api, str(flow_run["id"]))
    if api.resume(str(flow_run["id"])):
        return True
    state = ((api.read_flow_run(str(flow_run["id"])) or {}).get("state") or {}).get("type")
    return state in WAITING_STATES or state == "RUNNING"
