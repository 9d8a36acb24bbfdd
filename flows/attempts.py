"""Record the beginning and the end of an attempt of a run."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from prefect import runtime

from flows.flow_run_state import RUNNER_GONE
from lachesis.base.errors import (
    BillingError,
    LachesisError,
    MissingKeyError,
    ServerDownError,
)
from lachesis.base.secrets import redact
from lachesis.base.timestamps import now_iso
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.profiles import PROFILES
from lachesis.launch.resume import make_next_attempt_changes, needs_new_attempt
from lachesis.prefect_client.stop import STOPPED_BY_USER
from lachesis.runs.folder import RunDir
from lachesis.runs.host_clock import read_clocks
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import (
    RunRecord,
    RunStatusName,
    get_attempt_duration_s,
    mark_services_exited,
)
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.spending.ledger import promise_if_missing, settle_run
from lachesis.supervision import process_marks
from lachesis.supervision.running_services import ServiceGroup
from tasks.progress import record_final_judgement

log = logging.getLogger("lachesis.flow")
# Why a server does not go on with a run: for its user to mend, or for a resume.
ACCESS_CODES = (BillingError.code, MissingKeyError.code)
LOST_SERVER_CODE = ServerDownError.code
STOPPED_FROM_OUTSIDE = (
    "stopped by a cancellation in Prefect, the end of `lachesis serve`, `lachesis doctor --fix`, "
    "or a signal"
)


def end_stray_processes(folder: Path) -> None:
    """End the children of the environment that have left its process group."""
    for description in process_marks.terminate_processes(
        process_marks.find_processes(folder).get(folder, [])
    ):
        log.info("ended a process that the environment had left: %s", description)


def begin_attempt(store: RunStore, run_id: str) -> RunRecord:
    """Record that this flow makes the run's attempt, and return the record.

    A new attempt is made if this one has begun before, as when the flow run is retried in Prefect.
    """
    store.dir(run_id).stop_now_file.unlink(missing_ok=True)
    end_stray_processes(store.dir(run_id).path)  # A killed flow may have left some.
    clocks = read_clocks()
    attempt_fields: dict[str, Any] = {
        "status": "starting",
        "phase": "preparing",
        "error": None,
        "failed_service": None,
        "started_at": now_iso(),
        "began_monotonic_s": clocks.monotonic_s,
        "boot_id": clocks.boot,
        "attempt_duration_s": None,
        "healthy_at": None,
        "ended_at": None,
        "services": {},
        "dead_environments": {},
        "resumed": None,
        "flow_run_id": str(runtime.flow_run.id) if runtime.flow_run.id else None,
        "flow_pid": os.getpid(),
    }

    def make_changes(record: RunRecord) -> dict[str, Any]:
        if needs_new_attempt(record):
            store.dir(run_id).stop_file.unlink(missing_ok=True)
            return {**make_next_attempt_changes(record), **attempt_fields}
        return attempt_fields

    record = store.change(run_id, make_changes)
    promise_if_missing(store, record)
    return record


def record_exits(store: RunStore, run_id: str, group: ServiceGroup) -> None:
    """Record the exit codes of services that have ended."""
    recorded = store.load(run_id).services
    states = {
        name: {"state": f"exited ({code})"}
        for name, code in group.collect_exit_codes().items()
        if name in recorded and recorded[name].state != f"exited ({code})"
    }
    if states:
        store.update_services(run_id, states)


def _describe_stop(store: RunStore, record: RunRecord) -> str | None:
    """Return why a run was stopped, unless its user did it, and which steps were not saved."""
    stop_reason: str | None = record.stop_reason or STOPPED_FROM_OUTSIDE
    if stop_reason == STOPPED_BY_USER:
        stop_reason = None
    unsaved_steps = _describe_unsaved_steps(store.dir(record.run_id), record)
    return "; ".join(filter(None, (stop_reason, unsaved_steps))) or None


def find_server_stop(store: RunStore, record: RunRecord, error: BaseException) -> str | None:
    """Return why a paid run is stopped at its last checkpoint instead of failed, or None.

    That is so when the server refuses the key, asks for payment, has ended the session, or cannot
    be reached: the run itself is sound, and goes on when its user has mended the reason. A run that
    is to be resumed after a crash fails where a resume may help.
    """
    if not isinstance(error, LachesisError) or not PROFILES[record.profile].is_paid:
        return None
    code, _, sentence = str(error.details.get("cause") or "").partition(": ")
    config = read_effective_config(store.dir(record.run_id))
    codes = set(ACCESS_CODES)
    if config.limits.on_crash != "resume":
        codes.add(LOST_SERVER_CODE)
    if code not in codes:
        return None
    return redact(sentence.replace("lachesis resume RUN", f"lachesis resume {record.run_id}"))


def record_end(
    store: RunStore, run_id: str, status: RunStatusName, error: BaseException | None = None
) -> None:
    """Record how the run ended."""
    reason, service = None, None
    if isinstance(error, SystemExit):  # Logging to a runner that is gone raises it.
        reason = RUNNER_GONE
    elif error is not None:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, LachesisError):
            reason, service = str(error), error.details.get("service")
        reason = redact(reason)
    record = store.load(run_id)
    if status == "stopped":
        reason = _describe_stop(store, record)
    # A second signal may have come before the exit codes were recorded.
    services = mark_services_exited(record.services)
    changes = {
        "status": status,
        "phase": status,
        "error": reason,
        "failed_service": service,
        **make_end_fields(record),
    }
    settle_run(store, store.update(run_id, **changes, services=services))
    record_final_judgement(store, run_id)


def make_end_fields(record: RunRecord) -> dict[str, Any]:
    """Return the fields of the record that change at the end of an attempt."""
    return {"ended_at": now_iso(), "attempt_duration_s": get_attempt_duration_s(record)}


def _describe_unsaved_steps(folder: RunDir, record: RunRecord) -> str | None:
    """Describe the steps that a stopped run could not save because its trainer was killed, or
    return None.
    """
    trainer = record.services.get("trainer")
    if trainer is None or trainer.state == "exited (0)":
        return None
    last_step = max((int(line["step"]) for line in MetricsFile(folder.metrics).tail(1)), default=0)
    newest = Checkpoints(folder.checkpoints).find_newest()
    saved_step = newest.step if newest else 0
    if last_step > saved_step:
        return (
            f"the steps after {saved_step} of {last_step} were not saved, see "
            f"{folder.get_log_file('trainer')}"
        )
    return None
