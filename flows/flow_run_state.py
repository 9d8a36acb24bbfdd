"""Ask whether a flow run should end, and end it in a state whose message its reader needs.

Prefect logs a traceback of every failed or cancelled state that a flow returns. Here the state is
set first, and the flow then ends by the exception that leaves a state as it is.
"""

import os
from typing import Any

from prefect import runtime
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause

from lachesis.base.errors import LachesisError, ProcessExitedError, ServerDownError
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.runs_from_prefect import describe_refusal
from lachesis.runs.end_causes import CAUSES, EndCause
from lachesis.supervision.stop_requests import StopRequested

RUNNER_PID = os.getppid()
# States of a flow run that was suspended and resumed since the last check: it waits for a process.
RESUMED_STATES = frozenset({"SCHEDULED", "PENDING"})


def make_refusal(error: LachesisError) -> State[Any]:
    """Return the state of a refused or skipped flow run, with the error's message."""
    return State.model_validate(describe_refusal(error))


def end_flow_run(state: State[Any], *, force: bool = False) -> State[Any]:
    """Set the final state of this flow run and leave the flow.

    Args:
        state: The state.
        force: Whether the rules of the server are overruled, such as retries of a failed run.

    Returns:
        The state, for the flow to return, when the server does not respond.

    Raises:
        Pause: The state was set.
    """
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:
        return state
    content = {"type": state.type.value, "name": state.name, "message": state.message}
    try:
        new_state = PrefectApi().set_state(flow_run_id, content, force=force)
    except ServerDownError:
        return state
    raise Pause(state.message, state=State.model_validate(new_state))


def raise_if_stop_requested() -> None:
    """Check that the runner of this flow run lives, and that Prefect wants it to go on.

    A cancellation normally arrives as a signal; after an outage, or before the runner knows the
    flow's process, it may not. An outage of the server does not stop training.

    Raises:
        StopRequested: Somebody wants the run to end.
        ProcessExitedError: The runner is gone, or Prefect has given the flow run up; its detail
            `end_cause` says which.
    """
    # A process whose parent has died is adopted by another one.
    if os.getppid() != RUNNER_PID:
        raise ProcessExitedError(
            CAUSES[EndCause.SERVE_LOST].sentence, end_cause=EndCause.SERVE_LOST
        )
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:
        return
    try:
        flow_run = PrefectApi().read_flow_run(flow_run_id) or {}
        state = (flow_run.get("state") or {}).get("type")
    except ServerDownError:
        return
    if state == "PAUSED" or state in RESUMED_STATES:
        # It stops with a checkpoint, as if it was cancelled.
        raise StopRequested(EndCause.SUSPENDED)
    # A person may have set another state by hand; the flow itself completes only at its end.
    if state in ("CANCELLING", "CANCELLED"):
        raise StopRequested(EndCause.PREFECT)
    if state == "COMPLETED":
        raise StopRequested(EndCause.PREFECT, "marked as completed in Prefect")
    if state in ("CRASHED", "FAILED"):
        raise ProcessExitedError(
            f"Prefect has marked flow run {flow_run_id} as {state.lower()}; `lachesis resume` "
            "continues the run",
            end_cause=EndCause.FLOW_LOST,
        )
