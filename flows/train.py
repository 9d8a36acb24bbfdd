"""Define the flow `train`: one flow run is one attempt of a training run."""

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.states import Cancelled, Completed, Failed

from flows.attempts import (
    begin_attempt,
    end_stray_processes,
    find_termination_signal,
    record_end,
    record_exits,
)
from flows.flow_run_state import end_flow_run, make_refusal, raise_if_stop_requested
from lachesis.base.errors import LachesisError, ValidationMissingError
from lachesis.base.secrets import redact
from lachesis.config.launch_spec import RunLimits
from lachesis.inference_tests.required_test import require_validation
from lachesis.inference_tests.store import InferenceTestStore
from lachesis.prefect_client.flow_run_keys import require_free_run
from lachesis.prefect_client.runs_from_prefect import find_or_create_run
from lachesis.runs.end_causes import CAUSES, EndCause
from lachesis.runs.ending import find_end_cause
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.supervision import process_marks
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.serve_model import build_tiny_model, is_missing_tiny_model
from lachesis.supervision.stop_requests import StopCheck
from lachesis.supervision.training_run import TrainingRun
from tasks.progress import TrainingProgress, publish_run_verdict
from tasks.run_as_task import run_as_task

# How long a resumed run waits until the services of the previous attempt have ended.
#
# A trainer may need 180 s to save its checkpoint, and the other services end before and after it.
LOCK_TIMEOUT_S = 300.0
GRACE_WITHOUT_ENGINE_S = 5.0


# Prefect's own check of the types is off, because it logs a traceback of the error.
@flow(name="train", retries=0, validate_parameters=False)
def train(
    environment: str = "",
    profile: str = "embedded",
    steps: int | None = None,
    model: str | None = None,
    name: str | None = None,
    note: str | None = None,
    tags: list[str] | None = None,
    seed: int | None = None,
    from_checkpoint: str | None = None,
    require_validation: bool = False,
    without_validation: bool = False,
    confirmed: bool = False,
    settings: str | None = None,
    limits: RunLimits | None = None,
    run_id: str | None = None,
    by_agent: bool = False,
) -> State[Any] | None:
    """Train a language model on an environment. `LaunchSpec` describes the parameters; `run_id` is
    reserved for programs.
    """
    parameters = dict(locals())
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the runner's terminal must reach the runner only.
    store, flow_run_id = RunStore(), runtime.flow_run.id
    try:
        record = find_or_create_run(store, parameters, flow_run_id)
        require_free_run(store, record, flow_run_id)
    except LachesisError as error:
        return end_flow_run(make_refusal(error), force=True)
    if record.status == "completed":
        return end_flow_run(Completed(message=_describe_completed(record)))
    # The services inherit this lock, so a run is alive as long as one of its processes is.
    with store.dir(record.run_id).hold_alive_lock(LOCK_TIMEOUT_S) as lock_fd:
        return _run_and_record_end(store, record.run_id, lock_fd)


def _describe_completed(record: RunRecord) -> str:
    """Return why a flow run that was retried in Prefect has nothing to do."""
    return (
        f"the retry was refused: run {record.run_id} has completed its {record.total_steps} steps; "
        f"`lachesis resume {record.run_id} --set total_steps=N` trains on, with more steps"
    )


def _run_and_record_end(store: RunStore, run_id: str, lock_fd: int) -> State[Any] | None:
    """Run the services and record how the run ended."""
    record = begin_attempt(store, run_id)
    try:
        StopCheck(store, run_id, raise_if_stop_requested).check()
        _require_validation(store, record)
        _run_services(store, record, lock_fd)
    # Also SystemExit, which Prefect's logging raises when the runner is gone.
    except BaseException as error:
        ended = record_end(store, record, error)
        if termination_signal := find_termination_signal(error):
            raise termination_signal from None
        if CAUSES[find_end_cause(ended)].status == "stopped":
            # A suspended flow run is overruled, because no process waits to be resumed.
            return end_flow_run(
                Cancelled(message=f"stopped: {ended.stop_reason}"),
                force=ended.end_cause is EndCause.SUSPENDED,
            )
        return _fail(error)
    record_end(store, record)
    # The run may have been suspended after its last step; nothing is left to resume then.
    with contextlib.suppress(Pause):
        publish_run_verdict(store, run_id)
    return None


def _fail(error: BaseException) -> State[Any]:
    """End the flow run as failed or refused; an error that is no user's doing is raised again."""
    if isinstance(error, ValidationMissingError):
        return end_flow_run(make_refusal(error), force=True)
    if isinstance(error, LachesisError):
        return end_flow_run(Failed(message=redact(str(error))))
    if (redacted_error := redact(str(error))) != str(error):  # Prefect's server stores it.
        raise RuntimeError(redacted_error) from None
    raise error


def _require_validation(store: RunStore, record: RunRecord) -> None:
    """Check that a run that requires it has environments with a recent successful validation.

    Every attempt is checked until the run has made a step. A checkpoint does not prove that it has:
    a run that starts from another run's checkpoint has one from the start.

    Raises:
        ValidationMissingError: An environment has none.
    """
    folder = store.dir(record.run_id)
    if record.require_validation and not MetricsFile(folder.metrics).tail(1):
        config = read_effective_config(folder)
        tests = InferenceTestStore(store.home)
        require_validation(tests, config, record.environment_files, record.set_fields)


def _run_services(store: RunStore, record: RunRecord, lock_fd: int) -> None:
    """Run the services from the first process to the last, until all steps are made."""
    folder = store.dir(record.run_id)
    if is_missing_tiny_model(record.base_model, store.home):
        store.update(record.run_id, phase="building the tiny model")
        run_as_task("build tiny model", lambda: build_tiny_model(store.home, folder.path))
    mark_env = {process_marks.MARK_VARIABLE: process_marks.build_mark(folder.path)}
    progress = TrainingProgress(store, record, runtime.flow_run.id)
    with ServiceGroup(
        inherited_fds=(lock_fd,), stop_now_file=folder.stop_now_file, reaper_env=mark_env
    ) as group:
        training_run = TrainingRun(
            store,
            record,
            group,
            show_step=run_as_task,
            ask_stop=raise_if_stop_requested,
            report=progress.update,
        )
        try:
            training_run.start()
            training_run.supervise()
            progress.finish()
        finally:
            _ignore_sigterm()
            try:
                progress.finish()
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
    """End all services of the run, and soon kill a trainer whose engine has died.

    Without the engine the trainer cannot save anything and would retry until its time is over, so
    it is killed.
    """
    kill_timer = threading.Timer(GRACE_WITHOUT_ENGINE_S, stop_now_file.touch)
    if "engine" in group.collect_exit_codes():
        kill_timer.start()
    group.close()
    kill_timer.cancel()
