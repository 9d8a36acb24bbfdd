"""The flow `launch-training`: one flow run is one training run."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, TerminationSignal
from prefect.states import Cancelled

from flows.dead_environments import DeadEnvironmentDetector
from flows.service_restarter import ServiceRestarter
from flows.stop_requests import (
    CHECK_INTERVAL_S,
    RUNNER_GONE,
    StopRequested,
    SuspendRequested,
    leave_flow_run_suspended,
    raise_if_stop_requested,
    throttle,
)
from lachesis.base.errors import LachesisError, ProcessExitedError
from lachesis.base.host_clock import read_clocks
from lachesis.base.secrets import redact
from lachesis.config.profiles import check_profile
from lachesis.config.run_config import RunConfig
from lachesis.orchestration.launcher import STOPPED_BY_USER
from lachesis.orchestration.resuming import (
    belongs_to_attempt,
    make_next_attempt_changes,
    needs_new_attempt,
)
from lachesis.orchestration.suspension import describe_suspension, is_suspended, record_suspension
from lachesis.runs import leftovers
from lachesis.runs.budgets import compute_budget_usage, find_exceeded_budget
from lachesis.runs.checkpoints import Checkpoints
from lachesis.runs.evaluation import read_evaluation
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import (
    RunDir,
    RunRecord,
    RunStatusName,
    RunStore,
    get_attempt_duration_s,
    mark_services_exited,
    now_iso,
)
from lachesis.supervision.group import ServiceGroup, make_exit_error
from lachesis.supervision.plan import (
    START_ORDER,
    ServicePlan,
    fetch_trainer_health,
    make_training_plan,
)
from lachesis.supervision.process import ServiceSpec, get_service_role
from lachesis.validation.gate import require_validation
from lachesis.validation.tests import InferenceTestStore
from tasks.processes import (
    build_tiny_model,
    is_missing_tiny_model,
    start_service,
    wait_for_end,
    wait_for_service,
)
from tasks.report import ProgressArtifact, publish_report, record_final_judgement

log = logging.getLogger("lachesis.flow")

POLL_S = 0.5
LOCK_TIMEOUT_S = 300.0
"""How long a resumed run waits until the services of the attempt before have ended. A trainer may
need 180 s to save its checkpoint, and the other services are ended before and after it."""
STOPPED_FROM_OUTSIDE = "told to end by a cancellation in Prefect, the end of `lachesis serve`, `lachesis doctor --fix`, or a signal"
GRACE_WITHOUT_ENGINE_S = 5.0
DRAIN_TIMEOUT_S = 120.0
"""How long the trainer may wait for a batch after the environment has ended well: what it needs is
queued by then.
"""


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
    record = _begin_attempt(store, run_id, is_new_attempt=is_new_attempt)
    try:
        raise_if_stop_requested(store, run_id)
        _require_validation(store, record)
        phase = _run_services(store, record, lock_fd)
    except (SuspendRequested, Pause):  # the latter by a task of Prefect, which looks for itself
        record_suspension(store, store.load(run_id))
        _record_end(store, run_id, "stopped")
        return leave_flow_run_suspended()
    except StopRequested as request:
        _record_end(store, run_id, "stopped")
        return Cancelled(message=f"stopped: {store.load(run_id).stop_reason or request}")
    except BaseException as error:
        if termination_signal := find_termination_signal(error):
            _record_end(store, run_id, "stopped")
            raise termination_signal from None
        _record_end(store, run_id, "failed", error)
        if (redacted_error := redact(str(error))) != str(error):  # Prefect's server keeps it
            raise RuntimeError(redacted_error) from None
        raise
    store.update(run_id, status="completed", phase=phase, **_make_end_fields(store.load(run_id)))
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
                _record_exits(store, record.run_id, group)
            finally:  # also on a full disk
                _close_services(group, folder.stop_now_file)
                _end_stray_processes(folder.path)
            _record_exits(store, record.run_id, group)


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


def _end_stray_processes(folder: Path) -> None:
    """Children of the environment that left its process group."""
    for description in leftovers.terminate_processes(
        leftovers.find_processes(folder).get(folder, [])
    ):
        log.info("ended what the environment had left behind: %s", description)


def _begin_attempt(store: RunStore, run_id: str, *, is_new_attempt: bool) -> RunRecord:
    store.dir(run_id).stop_now_file.unlink(missing_ok=True)
    _end_stray_processes(store.dir(run_id).path)  # of a flow that was killed
    clocks = read_clocks()
    attempt_fields: dict[str, Any] = {
        "status": "starting",
        "phase": "preparing",
        "error": None,
        "failed_service": None,
        "started_at": now_iso(),
        "began_s": clocks.monotonic_s,
        "boot": clocks.boot,
        "took_s": None,
        "healthy_at": None,
        "ended_at": None,
        "services": {},
        "dead_environments": {},
        "evaluation": {},
        "resumed": None,
        "flow_run_id": str(runtime.flow_run.id) if runtime.flow_run.id else None,
        "flow_pid": os.getpid(),
    }
    return store.update(
        run_id,
        **{
            **(make_next_attempt_changes(store.load(run_id)) if is_new_attempt else {}),
            **attempt_fields,
        },
    )


def _record_exits(store: RunStore, run_id: str, group: ServiceGroup) -> None:
    services = store.load(run_id).services
    for name, code in group.collect_exit_codes().items():
        if name in services:
            store.update_service(run_id, name, state=f"exited ({code})")


def _record_end(
    store: RunStore, run_id: str, status: RunStatusName, error: BaseException | None = None
) -> None:
    """Write how the run ended into its record."""
    reason, service = None, None
    if isinstance(error, SystemExit):  # logging to a runner that is gone ends the process
        reason = RUNNER_GONE
    elif error is not None:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, LachesisError):
            reason, service = str(error), error.details.get("service")
        reason = redact(reason)
    record = store.load(run_id)
    if status == "stopped":
        stop_reason = (
            describe_suspension(run_id)
            if is_suspended(record)
            else record.stop_reason or STOPPED_FROM_OUTSIDE
        )
        reason = (
            "; ".join(
                filter(
                    None,
                    (
                        None if stop_reason == STOPPED_BY_USER else stop_reason,
                        _describe_unsaved_steps(store.dir(run_id), record),
                    ),
                )
            )
            or None
        )
    # a second signal may have come before their ends were noted
    services = mark_services_exited(record.services)
    changes = {
        "status": status,
        "phase": status,
        "error": reason,
        "failed_service": service,
        **_make_end_fields(record),
    }
    store.update(run_id, **changes, services=services)
    record_final_judgement(store, run_id)


def _make_end_fields(record: RunRecord) -> dict[str, Any]:
    return {"ended_at": now_iso(), "took_s": get_attempt_duration_s(record)}


def _describe_unsaved_steps(folder: RunDir, record: RunRecord) -> str | None:
    """That a stopped run could not save where it was: its trainer was killed, or there was no
    place.
    """
    trainer = record.services.get("trainer")
    if trainer is None or trainer.state == "exited (0)":
        return None
    last_step = max((int(line["step"]) for line in MetricsFile(folder.metrics).tail(1)), default=0)
    newest = Checkpoints(folder.checkpoints).find_newest()
    saved_step = newest.step if newest else 0
    return (
        f"the steps after {saved_step} of {last_step} were not saved, see {folder.get_log_file('trainer')}"
        if last_step > saved_step
        else None
    )


class TrainingRun:
    """The steps of one run, in order."""

    def __init__(self, store: RunStore, record: RunRecord, group: ServiceGroup) -> None:
        self.store, self.record, self.group, self.run_id = store, record, group, record.run_id
        self.folder = store.dir(record.run_id)
        check_profile(record.profile)
        checkpoint = Checkpoints(self.folder.checkpoints).find_resumable()
        config = RunConfig.from_yaml(self.folder.config)
        received_groups = (
            checkpoint.get_groups_by_environment(config.build_environment_configs())
            if checkpoint
            else None
        )
        self.plan: ServicePlan = make_training_plan(
            record, self.folder, config, received_groups=received_groups
        )
        self.plan.write_files()
        self.restarter = ServiceRestarter(
            store, self.run_id, group, self.plan, self._raise_if_stop_requested
        )
        self.check_stop_request = throttle(self._raise_if_stop_requested)
        self.env_ids = self.restarter.env_ids
        self.flow_run_id: str | None = runtime.flow_run.id
        self.dead_environment_detector = DeadEnvironmentDetector(
            store, self.run_id, self.plan, received=received_groups
        )

    def start(self) -> None:
        """Each service needs those before it, except that the API needs no engine, and that the
        first environment, which the API lets in once the trainer is there, may be imported
        meanwhile: these start two at a time.
        """
        starting_specs: list[ServiceSpec] = []
        first_environment = next(iter(self.env_ids))
        for spec in self.plan.services:
            if spec.name not in ("engine", "api", first_environment):
                self._wait_for_services(starting_specs)
            self._raise_if_stop_requested()
            start_service(self.group, spec, self.store, self.run_id)
            starting_specs.append(spec)
        self._wait_for_services(starting_specs)
        self.store.update(self.run_id, status="running", phase="training", healthy_at=now_iso())

    def _wait_for_services(self, starting_specs: list[ServiceSpec]) -> None:
        while starting_specs:
            spec = starting_specs.pop(0)
            self.store.update(self.run_id, phase=f"waiting for {spec.name}")
            wait_for_service(
                self.group, spec, self.store, self.run_id, on_poll=self.check_stop_request
            )
            self._raise_if_stop_requested()

    def supervise(self) -> str:
        """Until the trainer has made its last step; how it ended. Raises when a service dies too
        early or when told to stop.
        """
        progress = ProgressArtifact(self.run_id, self.flow_run_id)
        total, checked_at = self.plan.config.env.total_steps, time.monotonic()
        progressed_at, last_step = time.monotonic(), -1
        while True:
            health: dict[str, Any] = self.group.call_unless_service_dies(
                lambda: fetch_trainer_health(self.plan), {}
            )
            step = int(health.get("step") or 0)
            self.group.call_unless_service_dies(
                functools.partial(progress.publish, step, total), None
            )
            if step != last_step or any(map(self.group.is_running, self.env_ids)):
                progressed_at, last_step = time.monotonic(), step
            if time.monotonic() - progressed_at > DRAIN_TIMEOUT_S:
                return f"completed: the environment ended after {step} of {total} steps"
            self._record_trainer_info(health)
            if health.get("phase") == "finished" or self._handle_exits():
                progress.publish(total, total, force=True)
                return "completed"
            self._stop_if(health.get("over_budget"))
            if time.monotonic() - checked_at > CHECK_INTERVAL_S:
                checked_at = time.monotonic()
                self._check_budget()
                self.dead_environment_detector.check()
                self.group.call_unless_service_dies(self._raise_if_stop_requested, None)
            time.sleep(POLL_S)

    def _raise_if_stop_requested(self) -> None:
        raise_if_stop_requested(self.store, self.run_id)

    def _check_budget(self) -> None:
        """The time of the run, which only this process sees pass when the trainer hangs. Tokens and
        money are counted by the trainer, and all three by the monitor, which looks seldom, and not
        at all without a server.
        """
        self._stop_if(
            find_exceeded_budget(self.plan.config.limits, compute_budget_usage(self.record, {}))
        )

    def _stop_if(self, reason: str | None) -> None:
        """Raises StopRequested for a reason that is one."""
        if reason:
            self.store.update(self.run_id, stop_reason=reason)
            raise StopRequested(reason)

    def _handle_exits(self) -> bool:
        """True when the trainer has ended after its last step. An environment that has made its
        last rollout may end first. Any other death ends the attempt, or the service is started
        again.
        """
        exit_codes = self.group.collect_exit_codes()
        for name in sorted(
            exit_codes, key=lambda service: START_ORDER.index(get_service_role(service))
        ):
            code = exit_codes[name]
            self.group.require_reaper()
            if name == "trainer" and code == 0:
                if self._is_finished():
                    return True
                newest = Checkpoints(self.folder.checkpoints).find_newest()
                raise ProcessExitedError(
                    f"the trainer was told to end, by somebody else, after step {newest.step if newest else 0} of "
                    f"{self.plan.config.env.total_steps}; `lachesis resume {self.run_id}` goes on"
                )
            if not (name in self.env_ids and code == 0):
                self._restart(name, make_exit_error(self.plan.get_service(name), code))
                return False
            # it has no more items; the others need not wait for its share
            if len(self.env_ids) > 1:
                self.restarter.disconnect(self.env_ids[name])
        return False

    def _is_finished(self) -> bool:
        newest = Checkpoints(self.folder.checkpoints).find_newest()
        return newest is not None and newest.final

    def _restart(self, name: str, problem: ProcessExitedError) -> None:
        """Raises the problem when it ends the attempt."""
        self.dead_environment_detector.remember_usable()
        try:
            self.restarter.restart(name, problem)
        except ProcessExitedError:
            if not self._is_finished():  # the trainer may have made its last step meanwhile
                raise

    def _record_trainer_info(self, health: dict[str, Any]) -> None:
        trainer_info = {
            key: health[key] for key in ("resumed", "wandb_url", "wandb_error") if health.get(key)
        }
        if any(getattr(self.record, key) != value for key, value in trainer_info.items()):
            self.record = self.store.update(self.run_id, **trainer_info)

    def evaluate_held_out(self) -> None:
        """Evaluate both models on held-out items, at once.

        A failed evaluation is told, and the run stays completed. Raises what `require_wanted`
        raises when the run itself shall end.
        """
        if not self.plan.evaluations or not self.group.is_running("trainer"):
            return
        self.store.update(self.run_id, phase="evaluating")
        for environment in self.env_ids:
            self.group.stop(environment)
        for spec in self.plan.evaluations.values():
            with contextlib.suppress(ProcessExitedError):  # what could not be started is told below
                self.group.start(spec)
        required_services = [
            spec.name for spec in self.plan.services if spec.name in ("engine", "trainer")
        ]
        for evaluation_name, spec in self.plan.evaluations.items():
            try:
                wait_for_end(
                    self.group, spec, needs=required_services, on_poll=self.check_stop_request
                )
                recorded = self.store.load(self.run_id).evaluation
                when, _, environment_suffix = evaluation_name.partition("-")
                results = read_evaluation(self.folder.evaluation / evaluation_name)
                named_results = (
                    {f"{environment_suffix}/{key}": value for key, value in results.items()}
                    if environment_suffix
                    else results
                )
                self.store.update(
                    self.run_id,
                    evaluation={**recorded, when: {**recorded.get(when, {}), **named_results}},
                )
            except LachesisError as error:
                # the error may be the end of the run, and no evaluation's
                self._raise_if_stop_requested()
                log.warning("no evaluation %s training: %s", evaluation_name, error)
                if self.group.is_running(spec.name):  # it hangs, or prints without end
                    self.group.stop(spec.name)
