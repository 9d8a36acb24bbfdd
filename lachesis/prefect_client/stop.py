"""Ask a run to save a checkpoint and end, through Prefect or by a file where the server is away."""

import contextlib

from lachesis.base.errors import ServerDownError
from lachesis.base.files import write_private
from lachesis.base.waiting import wait_until
from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.end_causes import CAUSES, EndCause
from lachesis.runs.ending import end_run, request_stop, withdraw_stop
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore


def cancel_run(
    store: RunStore,
    record: RunRecord,
    cause: EndCause = EndCause.PERSON,
    sentence: str | None = None,
) -> None:
    """Ask the run to save a checkpoint and end; an earlier reason is kept.

    Without the server, a file in the run's folder has the same effect on a run that is alive. The
    `sentence` is the cause with what was seen of it.

    Raises:
        ServerDownError: The server does not respond, and no process of the run could be asked.
    """
    requested = request_stop(store, record.run_id, cause, sentence)
    reason = requested.stop_reason or CAUSES[cause].sentence
    if record.flow_run_id is None:  # It may be being submitted right now.
        end_run(store, record, cause, sentence)
        _cancel_unknown_flow_run(record, reason)
        return
    try:
        PrefectApi().cancel(record.flow_run_id, reason)
    except ServerDownError:
        if not store.dir(record.run_id).is_alive():
            if record.stop_cause is None:
                withdraw_stop(store, record.run_id, cause)
            raise
        write_private(store.dir(record.run_id).stop_file, "")


def _cancel_unknown_flow_run(record: RunRecord, reason: str) -> None:
    """Cancel the flow run, if Prefect has created it, of a submission without a known answer.

    Without the server nothing is lost: a flow run of a run that has ended is refused.
    """
    with contextlib.suppress(ServerDownError):
        api = PrefectApi()
        flow_run_id = api.find_flow_run(record.submission_key)
        if flow_run_id is not None:
            api.cancel(flow_run_id, reason)


def wait_until_gone(store: RunStore, record: RunRecord, timeout_s: float = 60.0) -> bool:
    """Wait until no service of the run exists and the flow has reported its end to the server."""

    def is_gone() -> bool:
        """Return whether no process of the run is left and its flow run has ended."""
        if store.dir(record.run_id).is_alive():
            return False
        try:
            state = (PrefectApi().read_flow_run(record.flow_run_id or "none") or {}).get(
                "state"
            ) or {}
        except ServerDownError:
            return True
        return state.get("type") in (None, "COMPLETED", "FAILED", "CRASHED", "CANCELLED")

    return wait_until(is_gone, timeout_s)
