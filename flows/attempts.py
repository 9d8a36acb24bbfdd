"""Record the beginning and the end of an attempt of a run."""

import logging
import os
from pathlib import Path
from typing import Any

from prefect import runtime
from prefect.exceptions import Pause, TerminationSignal

from flows.flow_run_state import raise_if_stop_requested
from lachesis.base.errors import (
    BillingError,
    InvalidGroupsError,
    LachesisError,
    MissingKeyError,
    ProcessExitedError,
    ServerDownError,
    ValidationMissingError,
)
from lachesis.base.secrets import redact
from lachesis.base.timestamps import now_iso
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.profiles import PROFILES
from lachesis.launch.resume import make_next_attempt_changes, needs_new_attempt
from lachesis.monitor.run_health import judge_ended_run
from lachesis.runs.end_causes import CAUSES, EndCause
from lachesis.runs.ending import end_run
from lachesis.runs.folder import RunDir
from lachesis.runs.host_clock import make_host_fields, read_clocks
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.spending.ledger import promise_if_missing, settle_run
from lachesis.supervision import process_marks
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.stop_requests import StopRequested

log = logging.getLogger("lachesis.flow")
# Why a server does not go on with a run: for its user to mend, or for a resume.
ACCESS_CODES = (BillingError.code, MissingKeyError.code)
LOST_SERVER_CODE = ServerDownError.code


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
    attempt_fields = _make_attempt_fields()

    def make_changes(record: RunRecord) -> dict[str, Any]:
        if needs_new_attempt(record):
            store.dir(run_id).stop_file.unlink(missing_ok=True)
            return {**make_next_attempt_changes(record), **attempt_fields}
        return attempt_fields

    record = store.change(run_id, make_changes)
    promise_if_missing(store, record)
    return record


def _make_attempt_fields() -> dict[str, Any]:
    """Return the fields of the record that change when an attempt begins in this process."""
    clocks = read_clocks()
    return {
        "status": "starting",
        "phase": "preparing",
        "error": None,
        "end_cause": None,
        "is_end_handled": False,
        "failed_service": None,
        "started_at": now_iso(),
        "began_monotonic_s": clocks.monotonic_s,
        **make_host_fields(),
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


def record_end(store: RunStore, record: RunRecord, error: BaseException | None = None) -> RunRecord:
    """Record the end of an attempt, judge the run, and settle its cost.

    Args:
        store: The runs of this home.
        record: The run as it was when the attempt began.
        error: What has ended the attempt; None if all steps are made.
    """
    cause, sentence = find_end(store, record, error)
    unsaved_steps = None
    if CAUSES[cause].status == "stopped":
        newest = store.load(record.run_id)
        unsaved_steps = _describe_unsaved_steps(store.dir(record.run_id), newest)
    ended = end_run(
        store,
        record,
        cause,
        sentence and redact(sentence),
        service=error.details.get("service") if isinstance(error, LachesisError) else None,
        unsaved_steps=unsaved_steps,
        by_flow=True,
    )
    if ended.end_cause is EndCause.SUSPENDED:  # A person wants it to wait.
        ended = store.update(record.run_id, resume_requested=False)
    settle_run(store, ended)
    return judge_ended_run(store, ended)


def find_end(
    store: RunStore, record: RunRecord, error: BaseException | None
) -> tuple[EndCause, str | None]:
    """Return why an attempt has ended, and that as a sentence if more is known than the cause."""
    if error is None:
        return EndCause.COMPLETED, None
    if isinstance(error, StopRequested):
        return error.cause, error.sentence
    if isinstance(error, Pause):  # Tasks of Prefect raise it when they see a suspension.
        return EndCause.SUSPENDED, None
    if find_termination_signal(error):
        return find_cause_of_signal(), None
    if isinstance(error, SystemExit):  # Logging to a runner that is gone raises it.
        return EndCause.SERVE_LOST, None
    if stop_reason := find_server_stop(store, record, error):
        return EndCause.SERVER, stop_reason
    if isinstance(error, InvalidGroupsError):
        return EndCause.INVALID_GROUPS, str(error)
    if isinstance(error, ValidationMissingError):
        return EndCause.NOT_VALIDATED, str(error)
    if isinstance(error, LachesisError):
        return EndCause(error.details.get("end_cause", EndCause.FAILED)), str(error)
    return EndCause.FAILED, f"{type(error).__name__}: {error}"


def find_termination_signal(error: BaseException | None) -> TerminationSignal | None:
    """Return the signal behind an error, also where Prefect has raised another error since."""
    while error is not None and not isinstance(error, TerminationSignal):
        error = error.__cause__ or error.__context__
    return error


def find_cause_of_signal() -> EndCause:
    """Return why a signal has come for which nobody has written a reason into the record."""
    try:
        raise_if_stop_requested()
    except StopRequested as request:
        return request.cause
    except ProcessExitedError:  # Nobody waits for the flow run any more.
        pass
    return EndCause.SIGNAL


def _describe_unsaved_steps(folder: RunDir, record: RunRecord) -> str | None:
    """Describe the steps that were lost because the trainer was killed, or return None."""
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
