"""Define the flow `launch-training`: one flow run is one training run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, TerminationSignal
from prefect.states import Cancelled

from flows.attempts import (
    begin_attempt,
    end_stray_processes,
    make_end_fields,
    record_end,
    record_exits,
)
from flows.stop_requests import (
    StopRequested,
    SuspendRequested,
    leave_flow_run_suspended,
    raise_if_stop_requested,
)
from flows.training_run import TrainingRun
from lachesis.base.secrets import redact
from lachesis.config.run_config import RunConfig
from lachesis.orchestration.resuming import belongs_to_attempt
from lachesis.orchestration.suspension import record_suspension
from lachesis.runs import leftovers
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.run_record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.supervision.group import ServiceGroup
from lachesis.validation.gate import require_validation
from lachesis.validation.inference_tests import InferenceTestStore
from tasks.processes import build_tiny_model, is_missing_tiny_model
from tasks.report import publish_report, record_final_judgement

# How long a resumed run waits until the services of the previous attempt have ended.
#
# A trainer may need 180 s to save its checkpoint, and the other services end before and after it.
LOCK_TIMEOUT_S = 300.0
GRACE_WITHOUT_ENGINE_S = 5.0


@flow(name="launch-training", retries=0)
def launch(run_id: str, home: str) -> State[Any] | None:
    """Start the services in order, supervise them, and end them in reverse order whatever
    happens.
    """
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the runner's terminal must reach the runner only.
    store = RunStore(Path(home))
    record = store.load(run_id)
    is_started_by_hand = not belongs_to_attempt(record, runtime.flow_run.id)
    if is_started_by_hand and store.dir(run_id).is_alive():
        return Cancelled(message=f"run {run_id} is alive already, as flow run {record.flow_run_id}")
    # The services inherit this lock, so a run is alive as long as one of its processes is.
    with store.dir(run_id).hold_alive_lock(LOCK_TIMEOUT_S) as lock_fd:
        return _run_and_record_end(store, run_id, lock_fd, is_started_by_hand=is_started_by_hand)


def _run_and_record_end(
    store: RunStore, run_id: str, lock_fd: int, *, is_started_by_hand: bool
) -> State[Any] | None:
    """Run the services and record how the run ended."""
    record = begin_attempt(store, run_id, is_started_by_hand=is_started_by_hand)
    try:
        raise_if_stop_requested(store, run_id, record)
        _require_validation(store, record)
        phase = _run_services(store, record, lock_fd)
    except (SuspendRequested, Pause):  # Tasks of Prefect raise Pause when they see a suspension.
        record_suspension(store, store.load(run_id))
        record_end(store, run_id, "stopped")
        return leave_flow_run_suspended()
    except StopRequested as request:
        record_end(store, run_id, "stopped")
        return Cancelled(message=f"stopped: {store.load(run_id).stop_reason or request}")
    # Also SystemExit, which Prefect's logging raises when the runner is gone.
    except BaseException as error:
        if termination_signal := find_termination_signal(error):
            record_end(store, run_id, "stopped")
            raise termination_signal from None
        record_end(store, run_id, "failed", error)
        if (redacted_error := redact(str(error))) != str(error):  # Prefect's server stores it.
            raise RuntimeError(redacted_error) from None
        raise
    store.update(run_id, status="completed", phase=phase, **make_end_fields(store.load(run_id)))
    record_final_judgement(store, run_id)
    # The run may have been suspended after its last step; nothing is left to resume then.
    with contextlib.suppress(Pause):
        publish_report(store, run_id)
    return None


def _require_validation(store: RunStore, record: RunRecord) -> None:
    """Check that a run that requires it has environments with a recent successful validation.

    Every attempt is checked until the run has made a step. A checkpoint does not prove that it has:
    a run that starts from another run's checkpoint has one from the start.

    Raises:
        ValidationMissingError: An environment has none.
    """
    folder = store.dir(record.run_id)
    if record.require_validation and not MetricsFile(folder.metrics).tail(1):
        config = RunConfig.from_yaml(folder.config)
        require_validation(InferenceTestStore(store.home), config, record.environment_files)


def find_termination_signal(error: BaseException | None) -> TerminationSignal | None:
    """Return the signal behind an error; if it arrives between Prefect's own steps, another error
    is raised.
    """
    while error is not None and not isinstance(error, TerminationSignal):
        error = error.__cause__ or error.__context__
    return error


def _run_services(store: RunStore, record: RunRecord, lock_fd: int) -> str:
    """Run the services from the first process to the last, and return how the run ended."""
    if is_missing_tiny_model(record.base_model, store.home):
        store.update(record.run_id, phase="building the tiny model")
        build_tiny_model(store.home, store.dir(record.run_id).path)
        raise_if_stop_requested(store, record.run_id)
    folder = store.dir(record.run_id)
    mark_env = {leftovers.MARK_VARIABLE: leftovers.build_mark(folder.path)}
    with ServiceGroup(
        inherited_fds=(lock_fd,), stop_now_file=folder.stop_now_file, reaper_env=mark_env
    ) as group:
        try:
            training_run = TrainingRun(store, record, group)
            training_run.start()
            phase = training_run.supervise()
            # Environments are stopped first, so that the evaluation has the whole engine.
            training_run.evaluate_held_out()
            return phase
        finally:
            _ignore_sigterm()
            try:
                store.update(record.run_id, status="stopping", phase="stopping")
                # Record what ended by itself before the others are ended.
                record_exits(store, record.run_id, group)
            finally:  # A full disk must not prevent the end of the services.
                _close_services(group, folder.stop_now_file)
                # A process may have left its group, as a daemon does; its mark still shows whose it
                # is.
                end_stray_processes(folder.path)
            record_exits(store, record.run_id, group)


def _ignore_sigterm() -> None:
    """Ignore further signals while the run is being ended.

    The runner sends one after the flow has seen the cancellation by itself. Prefect restores its
    own handler.
    """
    if threading.current_thread() is threading.main_thread() and callable(
        signal.getsignal(signal.SIGTERM)
    ):
        signal.signal(signal.SIGTERM, lambda *_: None)


def _close_services(group: ServiceGroup, stop_now_file: Path) -> None:
    """End the services.

    Without the engine the trainer cannot save anything and would retry until its time is over, so
    it is killed.
    """
    kill_timer = threading.Timer(GRACE_WITHOUT_ENGINE_S, stop_now_file.touch)
    if "engine" in group.collect_exit_codes():
        kill_timer.start()
    group.close()
    kill_timer.cancel()
