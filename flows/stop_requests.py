"""Find out whether the run of this flow should end: by its record, its runner, or its Prefect
state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from prefect import runtime

from lachesis.base.errors import ProcessExitedError, ServerDownError
from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from tasks.run_as_task import RequestToEnd

RUNNER_PID = os.getppid()
CHECK_INTERVAL_S = 3.0
# Why a run ends whose flow run is suspended: it stops with a checkpoint, as if it was cancelled.
SUSPENDED = "suspended in Prefect; Retry on its page, or `lachesis resume`, goes on"
# States of a flow run that was suspended and resumed since the last check: it waits for a process.
RESUMED_STATES = frozenset({"SCHEDULED", "PENDING"})
RUNNER_GONE = (
    "the runner of this run was killed; start another one with `lachesis serve`, then `lachesis "
    "resume` the run"
)


class StopRequested(RequestToEnd):
    """The record or the server says that this run should end.

    A cancellation normally arrives as a signal; after an outage, or before the runner knows the
    flow's process, it may not.
    """


def raise_if_stop_requested(store: RunStore, run_id: str, record: RunRecord | None = None) -> None:
    """Check that no end of the run was requested; after that no service may start.

    Args:
        store: The runs of this home.
        run_id: The run.
        record: Its record, if it was read just now.

    Raises:
        StopRequested: An end was requested.
        ProcessExitedError: The runner is gone, or Prefect has given the flow run up.
    """
    record = record or store.load(run_id)
    if record.stop_reason:
        raise StopRequested(record.stop_reason)
    # A process whose parent has died is adopted by another one.
    if os.getppid() != RUNNER_PID:
        raise ProcessExitedError(RUNNER_GONE)
    _check_flow_run_state(runtime.flow_run.id)


def _check_flow_run_state(flow_run_id: str | None) -> None:
    """Check the state of the flow run; an outage of the server does not stop training."""
    if flow_run_id is None:
        return
    try:
        flow_run = PrefectApi().read_flow_run(flow_run_id) or {}
        state = (flow_run.get("state") or {}).get("type")
    except ServerDownError:
        return
    if state == "PAUSED" or state in RESUMED_STATES:
        raise StopRequested(SUSPENDED)
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
