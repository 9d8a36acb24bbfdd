"""The flow `launch-training`: one flow run is one training run."""

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
from lachesis.orchestration.resuming import (
    belongs_to_attempt,
    needs_new_attempt,
)
from lachesis.orchestration.suspension import record_suspension
from lachesis.runs import leftovers
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.run_record import (
    RunRecord,
)
from lachesis.runs.store import RunStore
from lachesis.supervision.group import ServiceGroup
from lachesis.validation.gate import require_validation
from lachesis.validation.inference_tests import InferenceTestStore
from tasks.processes import (
    build_tiny_model,
    is_missing_tiny_model,
)
from tasks.report import publish_report, record_final_judgement

LOCK_TIMEOUT_S = 300.0
"""How long a resumed run waits until the services of the attempt before have ended. A trainer may
need 180 s to save its checkpoint, and the other services are ended before and after it."""
GRACE_WITHOUT_ENGINE_S = 5.0


@flow(name="launch-training", retries=0)
def launch(run_id: str, home: str) -> State[Any] | None:
    """Start the services in order, supervise them to the end, and end them in reverse order however
    this is left.
    """
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the terminal of the runner must reach the runner alone
    store = RunStore(Path(home))
    record = store.load(run_id)
    is_started_by_hand = not belongs_to_attempt(record, runtime.flow_run.id)
    if is_started_by_hand and store.dir(run_id).is_alive():
        return Cancelled(message=f"run {run_id} lives already, as flow run {record.flow_run_id}")
    with store.dir(run_id).hold_alive_lock(LOCK_TIMEOUT_S) as lock_fd:
        return _run_and_record_end(
            store,
            run_id,
            lock_fd,
            is_new_attempt=is_started_by_hand or needs_new_attempt(store.load(run_id)),
        )


def _run_and_record_end(
    store: RunStore, run_id: str, lock_fd: int, *, is_new_attempt: bool
) -> State[Any] | None:
    """The run, with its end written into its record whatever it is. `again` says that Prefect has
    started it, by a retry, a resume or by hand, and nobody has made a new attempt of it.
    """
    record = begin_attempt(store, run_id, is_new_attempt=is_new_attempt)
    try:
        raise_if_stop_requested(store, run_id)
        _require_validation(store, record)
        phase = _run_services(store, record, lock_fd)
    except (SuspendRequested, Pause):  # the latter by a task of Prefect, which looks for itself
        record_suspension(store, store.load(run_id))
        record_end(store, run_id, "stopped")
        return leave_flow_run_suspended()
    except StopRequested as request:
        record_end(store, run_id, "stopped")
        return Cancelled(message=f"stopped: {store.load(run_id).stop_reason or request}")
    except BaseException as error:
        if termination_signal := find_termination_signal(error):
            record_end(store, run_id, "stopped")
            raise termination_signal from None
        record_end(store, run_id, "failed", error)
        if (redacted_error := redact(str(error))) != str(error):  # Prefect's server keeps it
            raise RuntimeError(redacted_error) from None
        raise
    store.update(run_id, status="completed", phase=phase, **make_end_fields(store.load(run_id)))
    record_final_judgement(store, run_id)
    # suspended since its last step: there is nothing left to resume
    with contextlib.suppress(Pause):
        publish_report(store, run_id)
    return None


def _require_validation(store: RunStore, record: RunRecord) -> None:
    """Check that a run that asks for it has environments with a fresh successful validation.

    Every attempt is checked until the run has made a step. A checkpoint is no proof of one: a run
    that was begun from another run's checkpoint has it from the start.

    Raises:
        ValidationMissingError: An environment has none.
    """
    folder = store.dir(record.run_id)
    if record.require_validation and not MetricsFile(folder.metrics).tail(1):
        config = RunConfig.from_yaml(folder.config)
        require_validation(InferenceTestStore(store.home), config, record.environment_files)


def find_termination_signal(error: BaseException | None) -> TerminationSignal | None:
    """The signal behind an error: one that meets Prefect between two of its own steps comes to us
    as another error.
    """
    while error is not None and not isinstance(error, TerminationSignal):
        error = error.__cause__ or error.__context__
    return error


def _run_services(store: RunStore, record: RunRecord, lock_fd: int) -> str:
    """The run from its first process to its last; how it ended."""
    if is_missing_tiny_model(record.base_model, store.home):
        store.update(record.run_id, phase="building the tiny model")
        build_tiny_model(store.home, store.dir(record.run_id).path)
    folder = store.dir(record.run_id)
    mark_env = {leftovers.MARK_VARIABLE: leftovers.build_mark(folder.path)}
    with ServiceGroup(
        inherited_fds=(lock_fd,), stop_now_file=folder.stop_now_file, reaper_env=mark_env
    ) as group:
        try:
            training_run = TrainingRun(store, record, group)
            training_run.start()
            phase = training_run.supervise()
            training_run.evaluate_held_out()
            return phase
        finally:
            _ignore_sigterm()
            try:
                store.update(record.run_id, status="stopping", phase="stopping")
                # what died by itself, before the others are ended
                record_exits(store, record.run_id, group)
            finally:  # also on a full disk
                _close_services(group, folder.stop_now_file)
                end_stray_processes(folder.path)
            record_exits(store, record.run_id, group)


def _ignore_sigterm() -> None:
    """The run is being ended: a signal that asks for it once more, as the runner's after our own
    look at the flow run's state, must not cut that short. Prefect puts its handler back by itself.
    """
    if threading.current_thread() is threading.main_thread() and callable(
        signal.getsignal(signal.SIGTERM)
    ):
        signal.signal(signal.SIGTERM, lambda *_: None)


def _close_services(group: ServiceGroup, stop_now_file: Path) -> None:
    """End the services. Without its engine the trainer can save nothing, and would ask until its
    grace is over.
    """
    kill_timer = threading.Timer(GRACE_WITHOUT_ENGINE_S, stop_now_file.touch)
    if "engine" in group.collect_exit_codes():
        kill_timer.start()
    group.close()
    kill_timer.cancel()
