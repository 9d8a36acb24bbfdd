"""Record stop requests and ends of runs; no other module writes the end of a run.

The flow of a run writes its end, and where that is gone, whoever finds it dead: the monitor, a
command, a tool. The first one counts, and a run ends once in each attempt.
"""

import contextlib
from datetime import datetime
from typing import Any

from lachesis.base.timestamps import now_iso
from lachesis.runs.end_causes import CAUSES, EndCause
from lachesis.runs.folder import RunDir
from lachesis.runs.host_clock import is_same_boot, read_boot_id, read_host_id
from lachesis.runs.record import RunRecord, get_attempt_duration_s, mark_services_exited
from lachesis.runs.store import RunStore


def request_stop(
    store: RunStore, run_id: str, cause: EndCause, sentence: str | None = None
) -> RunRecord:
    """Record the reason of a stop request; the first reason is kept.

    Args:
        store: The runs of this home.
        run_id: The run.
        cause: Why.
        sentence: The cause with what was seen of it.
    """

    def make_changes(record: RunRecord) -> dict[str, Any]:
        if record.has_ended or record.stop_cause is not None:
            return {}
        return {"stop_cause": cause, "stop_reason": sentence or CAUSES[cause].sentence}

    return store.change(run_id, make_changes)


def withdraw_stop(store: RunStore, run_id: str, cause: EndCause) -> RunRecord:
    """Take back a request that nobody could carry out."""

    def make_changes(record: RunRecord) -> dict[str, Any]:
        if record.has_ended or record.stop_cause is not cause:
            return {}
        return {"stop_cause": None, "stop_reason": None}

    return store.change(run_id, make_changes)


def end_run(
    store: RunStore,
    record: RunRecord,
    cause: EndCause,
    sentence: str | None = None,
    *,
    service: str | None = None,
    unsaved_steps: str | None = None,
    by_flow: bool = False,
) -> RunRecord:
    """Record the end of a run's attempt, unless it has ended already, and return the record.

    A run that somebody has asked to end has ended for that reason, unless it failed by itself.

    Args:
        store: The runs of this home.
        record: The run in the attempt that has ended; nothing changes if it is at another one.
        cause: Why it has ended.
        sentence: The cause with what was seen of it.
        service: The process whose end made it fail.
        unsaved_steps: Which steps were not saved, as a sentence.
        by_flow: Whether the flow of the attempt ends now. Otherwise its last sign of life counts.
    """

    def make_changes(newest: RunRecord) -> dict[str, Any]:
        """Return the fields of the end, or none for an ended or another attempt."""
        if newest.has_ended or newest.attempt != record.attempt:
            return {}
        duration_s = get_attempt_duration_s(newest)
        if not by_flow:
            duration_s = min(duration_s, _estimate_attempt_s(store, newest))
        return {
            **_make_cause_fields(newest, cause, sentence, unsaved_steps),
            "failed_service": service,
            "ended_at": now_iso(),
            "attempt_duration_s": duration_s,
            # A second signal may have come before the exit codes were recorded.
            "services": mark_services_exited(newest.services),
        }

    return store.change(record.run_id, make_changes)


def _make_cause_fields(
    record: RunRecord, cause: EndCause, sentence: str | None, unsaved_steps: str | None
) -> dict[str, Any]:
    """Return the fields of a record about its end: the requested cause, if the run was stopped."""
    reason = sentence or CAUSES[cause].sentence
    if CAUSES[cause].status == "stopped" and record.stop_cause is not None:
        cause, reason = record.stop_cause, record.stop_reason or reason
    rule = CAUSES[cause]
    text = "; ".join(filter(None, (None if rule.is_wanted else reason, unsaved_steps)))
    return {
        "status": rule.status,
        "phase": rule.sentence if rule.is_wanted else rule.status,
        "end_cause": cause,
        "stop_reason": reason if rule.status == "stopped" else record.stop_reason,
        "error": text or None,
    }


def _estimate_attempt_s(store: RunStore, record: RunRecord) -> float:
    """Return how long an attempt lasted whose end was not recorded: until its last write to a file.

    The host may have been switched off since.
    """
    if record.started_at is None:
        return 0.0
    # Files tell the time of the last sign of life; the record's own times are older.
    write_times = [0.0]
    for file in (store.dir(record.run_id).metrics, store.dir(record.run_id).record):
        with contextlib.suppress(OSError):
            write_times.append(file.stat().st_mtime)
    return max(0.0, max(write_times) - datetime.fromisoformat(record.started_at).timestamp())


def is_elsewhere(record: RunRecord) -> bool:
    """Return whether a run's attempt began on another host: the home is shared or was copied.

    Only the run's own host can tell whether its processes live, so nobody else writes its end.
    """
    if record.host_id in (None, read_host_id()):
        return False
    # A container that was made anew has another identity, and the same host under it.
    return record.boot_id is None or not is_same_boot(record.boot_id, read_boot_id())


def is_lost_elsewhere(run_dir: RunDir, record: RunRecord) -> bool:
    """Return whether a run has begun on another host and shows no life, as in a copied home.

    A person may end such a run here; nobody does it by looking at it.
    """
    return (
        is_elsewhere(record)
        and not record.has_ended
        and record.started_at is not None
        and not run_dir.was_alive_lately()
    )


def find_lost_cause(run_dir: RunDir, record: RunRecord) -> EndCause | None:
    """Return why a run is dead that has not recorded its end, or None if it may be alive.

    The lock tells it in the boot in which the attempt began. After a restart of its host, or where
    two hosts have one identity, a run is dead that has shown no life for a minute.
    """
    if is_elsewhere(record) or run_dir.is_alive():
        return None
    if record.boot_id is None or is_same_boot(record.boot_id, read_boot_id()):
        return EndCause.FLOW_LOST
    return None if run_dir.was_alive_lately() else EndCause.HOST_LOST


def find_end_cause(record: RunRecord) -> EndCause:
    """Return why an ended run has ended; the plain cause of its status where none is recorded."""
    if record.end_cause is not None:
        return record.end_cause
    plain = {"completed": EndCause.COMPLETED, "stopped": EndCause.PERSON}
    return plain.get(record.status, EndCause.FAILED)


def has_crashed(record: RunRecord) -> bool:
    """Return whether `limits.on_crash` acts on an ended run: it had trained, it failed, neither
    its model nor its environment is the cause, and nobody had stopped it.
    """
    if not record.has_ended or record.stop_cause is not None:
        return False
    return CAUSES[find_end_cause(record)].is_crash and record.has_been_healthy
