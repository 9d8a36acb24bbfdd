"""Find out whether the run of this flow should end: by its record, its runner, or its Prefect
state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from prefect import runtime
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.states import Cancelled

from lachesis.base.errors import ProcessExitedError, ServerDownError
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.orchestration.suspension import (
    SUSPENDED,
    WAITING_STATES,
    record_suspension,
    remove_pause_timeout,
)
from lachesis.runs.run_record import RunRecord
from lachesis.runs.store import RunStore
from tasks.outcomes import RequestToEnd

RUNNER_PID = os.getppid()
CHECK_INTERVAL_S = 3.0
RUNNER_GONE = (
    "the runner of this run was killed; start another one with `lachesis serve`, then `lachesis "
    "resume` the run"
)


class StopRequested(RequestToEnd):
    """The record or the server says that this run should end.

    A cancellation normally arrives as a signal; after an outage, or before the runner knows the
    flow's process, it may not.
    """


class SuspendRequested(StopRequested):
    """The flow run was suspended: it should end with a checkpoint and wait to be resumed."""


def raise_if_stop_requested(store: RunStore, run_id: str, record: RunRecord | None = None) -> None:
    """Check that no end of the run was requested; after that no service may start.

    Args:
        store: The runs of this home.
        run_id: The run.
        record: Its record, if it was read just now.

    Raises:
        StopRequested: An end was requested; a suspension raises `SuspendRequested`.
        ProcessExitedError: The runner is gone, or Prefect has given the flow run up.
    """
    record = record or store.load(run_id)
    if record.stop_reason == SUSPENDED:
        raise SuspendRequested(SUSPENDED)
    if record.stop_reason:
        raise StopRequested(record.stop_reason)
    # A process whose parent has died is adopted by another one.
    if os.getppid() != RUNNER_PID:
        raise ProcessExitedError(RUNNER_GONE)
    try:
        _check_flow_run_state(runtime.flow_run.id)
    except SuspendRequested:
        record_suspension(store, record)
        raise


def _check_flow_run_state(flow_run_id: str | None) -> None:
    """Check the state of the flow run; an outage of the server does not stop training."""
    if flow_run_id is None:
        return
    try:
        api = PrefectApi()
        flow_run = api.read_flow_run(flow_run_id) or {}
        state = (flow_run.get("state") or {}).get("type")
        if state == "PAUSED":
            remove_pause_timeout(api, flow_run_id)
    except ServerDownError:
        return
    # The run was suspended, or suspended and resumed, since the last check.
    if state == "PAUSED" or state in WAITING_STATES:
        raise SuspendRequested(SUSPENDED)
    # A person may have set another state by hand; the flow itself completes only at its end.
    if state in ("CANCELLING", "CANCELLED", "COMPLETED"):
        raise StopRequested(f"marked as {state.lower()} in Prefect")
    if state in ("CRASHED", "FAILED"):
        raise ProcessExitedError(
            f"Prefect has marked flow run {flow_run_id} as {state.lower()}; `lachesis resume` "
            "continues the run"
        )


def throttle(check: Callable[[], None]) -> Callable[[], None]:
    """Return a function that may be called often and runs `check` at most every `CHECK_INTERVAL_S`
    seconds.
    """
    checked_at = time.monotonic()

    def check_throttled() -> None:
        nonlocal checked_at
        if time.monotonic() - checked_at > CHECK_INTERVAL_S:
            checked_at = time.monotonic()
            check()

    return check_throttled


def leave_flow_run_suspended() -> State[Any]:
    """Leave the flow run suspended, or waiting for its next process, by raising Prefect's `Pause`.

    Returns:
        The final state, if it was cancelled while its services were being ended.
    """
    flow_run_id = runtime.flow_run.id or "none"
    try:
        api = PrefectApi()
        flow_run = api.read_flow_run(flow_run_id) or {}
        state = (flow_run.get("state") or {}).get("type")
        if state == "PAUSED":  # A task of Prefect may have seen the suspension first.
            remove_pause_timeout(api, flow_run_id)
    except ServerDownError:
        state = "PAUSED"
    if state in ("CANCELLING", "CANCELLED"):
        return Cancelled(message=f"{SUSPENDED}, then cancelled")
    # Prefect leaves the state of a flow run that ends by this exception as it is.
    raise Pause(SUSPENDED)
