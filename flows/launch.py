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

from flows.groups_watch import GroupsWatch
from flows.restarting import Restarting
from flows.wanted import (
    RUNNER_GONE,
    WATCH_S,
    StopRequested,
    SuspendRequested,
    leave_suspended,
    require_wanted,
    seldom,
)
from lachesis.base.errors import LachesisError, ProcessExitedError
from lachesis.base.host_clock import read_clocks
from lachesis.base.secrets import redact
from lachesis.config.profiles import check_profile
from lachesis.config.run_config import RunConfig
from lachesis.orchestration.launcher import STOPPED_BY_USER
from lachesis.orchestration.resuming import belongs_to_attempt, make_next_attempt_changes, needs_new_attempt
from lachesis.orchestration.suspension import is_suspended, record_suspension, describe_suspension
from lachesis.runs import leftovers
from lachesis.runs.budgets import find_exceeded_budget, compute_budget_usage
from lachesis.runs.checkpoints import Checkpoints
from lachesis.runs.evaluation import read_evaluation
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunDir, RunRecord, RunStore, RunStatusName, mark_services_exited, get_attempt_duration_s, now_iso
from lachesis.supervision.group import ServiceGroup, make_exit_error
from lachesis.supervision.plan import START_ORDER, ServicePlan, make_training_plan, fetch_trainer_health
from lachesis.supervision.process import ServiceSpec, get_service_role
from lachesis.validation.gate import require_validation
from lachesis.validation.tests import InferenceTestStore
from tasks.processes import build_tiny_model, is_missing_tiny_model, start_service, wait_for_end, wait_for_service
from tasks.report import Progress, judge_at_end, publish_report

log = logging.getLogger("lachesis.flow")

POLL_S = 0.5
HELD_S = 300.0
"""How long a resumed run waits until the services of the attempt before have ended. A trainer may
need 180 s to save its checkpoint, and the other services are ended before and after it."""
FROM_OUTSIDE = "told to end by a cancellation in Prefect, the end of `lachesis serve`, `lachesis doctor --fix`, or a signal"
WITHOUT_ENGINE_S = 5.0
LEFTOVER_S = 120.0
"""How long the trainer may wait for a batch after the environment has ended well: what it needs is queued by then."""


@flow(name="launch-training", retries=0)
def launch(run_id: str, home: str) -> State[Any] | None:
    """Start the services in order, supervise them to the end, and end them in reverse order however this is left."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the terminal of the runner must reach the runner alone
    store = RunStore(Path(home))
    record = store.load(run_id)
    by_hand = not belongs_to_attempt(record, runtime.flow_run.id)
    if by_hand and store.dir(run_id).is_alive():
        return Cancelled(message=f"run {run_id} lives already, as flow run {record.flow_run_id}")
    with store.dir(run_id).hold_alive_lock(HELD_S) as lock:
        return _recorded(store, run_id, lock, again=by_hand or needs_new_attempt(store.load(run_id)))


def _recorded(store: RunStore, run_id: str, lock: int, *, again: bool) -> State[Any] | None:
    """The run, with its end written into its record whatever it is. `again` says that Prefect has started it, by a retry, a
    resume or by hand, and nobody has made a new attempt of it."""
    record = _begin(store, run_id, again=again)
    try:
        require_wanted(store, run_id)
        _require_validation(store, record)
        phase = _start_to_end(store, record, lock)
    except (SuspendRequested, Pause):  # the latter by a task of Prefect, which looks for itself
        record_suspension(store, store.load(run_id))
        _end(store, run_id, "stopped")
        return leave_suspended()
    except StopRequested as request:
        _end(store, run_id, "stopped")
        return Cancelled(message=f"stopped: {store.load(run_id).stop_reason or request}")
    except BaseException as error:
        if signalled := told_to_end(error):
            _end(store, run_id, "stopped")
            raise signalled from None
        _end(store, run_id, "failed", error)
        if (told := redact(str(error))) != str(error):  # Prefect's server keeps it
            raise RuntimeError(told) from None
        raise
    store.update(run_id, status="completed", phase=phase, **_over(store.load(run_id)))
    judge_at_end(store, run_id)
    with contextlib.suppress(Pause):  # suspended since its last step: there is nothing left to resume
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


def told_to_end(error: BaseException | None) -> TerminationSignal | None:
    """The signal behind an error: one that meets Prefect between two of its own steps comes to us as another error."""
    while error is not None and not isinstance(error, TerminationSignal):
        error = error.__cause__ or error.__context__
    return error


def _start_to_end(store: RunStore, record: RunRecord, lock: int) -> str:
    """The run from its first process to its last; how it ended."""
    if is_missing_tiny_model(record.base_model, store.home):
        store.update(record.run_id, phase="building the tiny model")
        build_tiny_model(store.home, store.dir(record.run_id).path)
    folder = store.dir(record.run_id)
    own = {leftovers.MARK_VARIABLE: leftovers.build_mark(folder.path)}
    with ServiceGroup(inherited_fds=(lock,), stop_now_file=folder.stop_now_file, reaper_env=own) as group:
        try:
            run = _Run(store, record, group)
            run.start()
            phase = run.supervise()
            run.evaluate()
            return phase
        finally:
            _hear_no_more()
            try:
                store.update(record.run_id, status="stopping", phase="stopping")
                _note_exits(store, record.run_id, group)  # what died by itself, before the others are ended
            finally:  # also on a full disk
                _close(group, folder.stop_now_file)
                _end_strays(folder.path)
            _note_exits(store, record.run_id, group)


def _hear_no_more() -> None:
    """The run is being ended: a signal that asks for it once more, as the runner's after our own look at the flow run's state,
    must not cut that short. Prefect puts its handler back by itself."""
    if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, lambda *_: None)


def _close(group: ServiceGroup, hurry: Path) -> None:
    """End the services. Without its engine the trainer can save nothing, and would ask until its grace is over."""
    impatience = threading.Timer(WITHOUT_ENGINE_S, hurry.touch)
    if "engine" in group.collect_exit_codes():
        impatience.start()
    group.close()
    impatience.cancel()


def _end_strays(folder: Path) -> None:
    """Children of the environment that left its process group."""
    for told in leftovers.terminate_processes(leftovers.find_processes(folder).get(folder, [])):
        log.info("ended what the environment had left behind: %s", told)


def _begin(store: RunStore, run_id: str, *, again: bool) -> RunRecord:
    store.dir(run_id).stop_now_file.unlink(missing_ok=True)
    _end_strays(store.dir(run_id).path)  # of a flow that was killed
    clocks = read_clocks()
    begun: dict[str, Any] = {
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
    return store.update(run_id, **{**(make_next_attempt_changes(store.load(run_id)) if again else {}), **begun})


def _note_exits(store: RunStore, run_id: str, group: ServiceGroup) -> None:
    known = store.load(run_id).services
    for name, code in group.collect_exit_codes().items():
        if name in known:
            store.update_service(run_id, name, state=f"exited ({code})")


def _end(store: RunStore, run_id: str, status: RunStatusName, error: BaseException | None = None) -> None:
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
        asked = describe_suspension(run_id) if is_suspended(record) else record.stop_reason or FROM_OUTSIDE
        reason = "; ".join(filter(None, (None if asked == STOPPED_BY_USER else asked, _unsaved(store.dir(run_id), record)))) or None
    services = mark_services_exited(record.services)  # a second signal may have come before their ends were noted
    ended = {"status": status, "phase": status, "error": reason, "failed_service": service, **_over(record)}
    store.update(run_id, **ended, services=services)
    judge_at_end(store, run_id)


def _over(record: RunRecord) -> dict[str, Any]:
    return {"ended_at": now_iso(), "took_s": get_attempt_duration_s(record)}


def _unsaved(folder: RunDir, record: RunRecord) -> str | None:
    """That a stopped run could not save where it was: its trainer was killed, or there was no place."""
    trainer = record.services.get("trainer")
    if trainer is None or trainer.state == "exited (0)":
        return None
    made = max((int(line["step"]) for line in MetricsFile(folder.metrics).tail(1)), default=0)
    newest = Checkpoints(folder.checkpoints).find_newest()
    kept = newest.step if newest else 0
    return f"the steps after {kept} of {made} were not saved, see {folder.get_log_file('trainer')}" if made > kept else None


class _Run:
    """The steps of one run, in order."""

    def __init__(self, store: RunStore, record: RunRecord, group: ServiceGroup) -> None:
        self.store, self.record, self.group, self.run_id = store, record, group, record.run_id
        self.folder = store.dir(record.run_id)
        check_profile(record.profile)
        found = Checkpoints(self.folder.checkpoints).find_resumable()
        config = RunConfig.from_yaml(self.folder.config)
        resume = found.get_groups_by_environment(config.build_environment_configs()) if found else None
        self.plan: ServicePlan = make_training_plan(record, self.folder, config, received_groups=resume)
        self.plan.write_files()
        self.again = Restarting(store, self.run_id, group, self.plan, self._require_wanted)
        self.look = seldom(self._require_wanted)
        self.numbers = self.again.numbers
        self.flow_run_id: str | None = runtime.flow_run.id
        self.groups = GroupsWatch(store, self.run_id, self.plan, received=resume)

    def start(self) -> None:
        """Each service needs those before it, except that the API needs no engine, and that the first environment, which the
        API lets in once the trainer is there, may be imported meanwhile: these start two at a time."""
        waiting: list[ServiceSpec] = []
        first = next(iter(self.numbers))
        for spec in self.plan.services:
            if spec.name not in ("engine", "api", first):
                self._wait(waiting)
            self._require_wanted()
            start_service(self.group, spec, self.store, self.run_id)
            waiting.append(spec)
        self._wait(waiting)
        self.store.update(self.run_id, status="running", phase="training", healthy_at=now_iso())

    def _wait(self, waiting: list[ServiceSpec]) -> None:
        while waiting:
            spec = waiting.pop(0)
            self.store.update(self.run_id, phase=f"waiting for {spec.name}")
            wait_for_service(self.group, spec, self.store, self.run_id, look=self.look)
            self._require_wanted()

    def supervise(self) -> str:
        """Until the trainer has made its last step; how it ended. Raises when a service dies too early or when told to stop."""
        progress = Progress(self.run_id, self.flow_run_id)
        total, watched = self.plan.config.env.total_steps, time.monotonic()
        moved, last_step = time.monotonic(), -1
        while True:
            health: dict[str, Any] = self.group.call_unless_service_dies(lambda: fetch_trainer_health(self.plan), {})
            step = int(health.get("step") or 0)
            self.group.call_unless_service_dies(functools.partial(progress.publish, step, total), None)
            if step != last_step or any(map(self.group.is_running, self.numbers)):
                moved, last_step = time.monotonic(), step
            if time.monotonic() - moved > LEFTOVER_S:
                return f"completed: the environment ended after {step} of {total} steps"
            self._note_told(health)
            if health.get("phase") == "finished" or self._ended():
                progress.publish(total, total, force=True)
                return "completed"
            self._stop_if(health.get("over_budget"))
            if time.monotonic() - watched > WATCH_S:
                watched = time.monotonic()
                self._check_budget()
                self.groups.check()
                self.group.call_unless_service_dies(self._require_wanted, None)
            time.sleep(POLL_S)

    def _require_wanted(self) -> None:
        require_wanted(self.store, self.run_id)

    def _check_budget(self) -> None:
        """The time of the run, which only this process sees pass when the trainer hangs. Tokens and money are counted by the
        trainer, and all three by the monitor, which looks seldom, and not at all without a server."""
        self._stop_if(find_exceeded_budget(self.plan.config.limits, compute_budget_usage(self.record, {})))

    def _stop_if(self, reason: str | None) -> None:
        """Raises StopRequested for a reason that is one."""
        if reason:
            self.store.update(self.run_id, stop_reason=reason)
            raise StopRequested(reason)

    def _ended(self) -> bool:
        """True when the trainer has ended after its last step. An environment that has made its last rollout may end first. Any
        other death ends the attempt, or the service is started again."""
        exited = self.group.collect_exit_codes()
        for name in sorted(exited, key=lambda one: START_ORDER.index(get_service_role(one))):
            code = exited[name]
            self.group.require_reaper()
            if name == "trainer" and code == 0:
                if self._finished():
                    return True
                newest = Checkpoints(self.folder.checkpoints).find_newest()
                raise ProcessExitedError(
                    f"the trainer was told to end, by somebody else, after step {newest.step if newest else 0} of "
                    f"{self.plan.config.env.total_steps}; `lachesis resume {self.run_id}` goes on"
                )
            if not (name in self.numbers and code == 0):
                self._restart(name, make_exit_error(self.plan.get_service(name), code))
                return False
            if len(self.numbers) > 1:  # it has no more items; the others need not wait for its share
                self.again.forget(self.numbers[name])
        return False

    def _finished(self) -> bool:
        newest = Checkpoints(self.folder.checkpoints).find_newest()
        return newest is not None and newest.final

    def _restart(self, name: str, problem: ProcessExitedError) -> None:
        """Raises the problem when it ends the attempt."""
        self.groups.remember()
        try:
            self.again.restart(name, problem)
        except ProcessExitedError:
            if not self._finished():  # the trainer may have made its last step meanwhile
                raise

    def _note_told(self, health: dict[str, Any]) -> None:
        told = {key: health[key] for key in ("resumed", "wandb_url", "wandb_error") if health.get(key)}
        if any(getattr(self.record, key) != value for key, value in told.items()):
            self.record = self.store.update(self.run_id, **told)

    def evaluate(self) -> None:
        """Evaluate both models on held-out items, at once.

        A failed evaluation is told, and the run stays completed. Raises what `require_wanted` raises
        when the run itself shall end.
        """
        if not self.plan.evaluations or not self.group.is_running("trainer"):
            return
        self.store.update(self.run_id, phase="evaluating")
        for environment in self.numbers:
            self.group.stop(environment)
        for spec in self.plan.evaluations.values():
            with contextlib.suppress(ProcessExitedError):  # what could not be started is told below
                self.group.start(spec)
        needed = [spec.name for spec in self.plan.services if spec.name in ("engine", "trainer")]
        for which, spec in self.plan.evaluations.items():
            try:
                wait_for_end(self.group, spec, needs=needed, look=self.look)
                known = self.store.load(self.run_id).evaluation
                when, _, other = which.partition("-")
                found = read_evaluation(self.folder.evaluation / which)
                named = {f"{other}/{key}": value for key, value in found.items()} if other else found
                self.store.update(self.run_id, evaluation={**known, when: {**known.get(when, {}), **named}})
            except LachesisError as error:
                self._require_wanted()  # the error may be the end of the run, and no evaluation's
                log.warning("no evaluation %s training: %s", which, error)
                if self.group.is_running(spec.name):  # it hangs, or prints without end
                    self.group.stop(spec.name)
