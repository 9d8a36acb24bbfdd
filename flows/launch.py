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
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, State

from lachesis import tally as tallies
from lachesis.config import RunConfig
from lachesis.errors import LachesisError, ProcessExitedError, ServerDownError
from lachesis.inference_tests import InferenceTests
from lachesis.launcher import BY_USER, is_submission, next_attempt
from lachesis.limits import exceeded, spent
from lachesis.prefect_api import PrefectApi
from lachesis.profiles import check_profile
from lachesis.runs import RunRecord, RunStore, Status, exited, now
from lachesis.supervision import leftovers
from lachesis.supervision.evaluation import read_evaluation
from lachesis.supervision.group import ServiceGroup, death
from lachesis.supervision.plan import ORDER, Plan, forget_environment, make_plan, trainer_health
from lachesis.supervision.policy import DEATHS, Restarts
from lachesis.supervision.process import ServiceSpec, role
from lachesis.trainer.checkpoints import Checkpoints
from lachesis.validations import require_validation
from tasks.processes import build_tiny_model, is_missing_tiny_model, start_service, wait_for_end, wait_for_service
from tasks.report import Progress, publish_report

log = logging.getLogger("lachesis.flow")
logging.getLogger("lachesis").setLevel(logging.INFO)  # without a level of its own nothing of it reaches the run's page

RUNNER_PID = os.getppid()
POLL_S = 0.5
WATCH_S = 3.0
RUNNER_GONE = "the runner of this run was killed; `lachesis serve` starts another one, then `lachesis resume` the run"
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
    by_hand = not is_submission(record, runtime.flow_run.id)
    if by_hand and store.dir(run_id).is_alive():
        return Cancelled(message=f"run {run_id} lives already, as flow run {record.flow_run_id}")
    with store.dir(run_id).living() as lock:
        return _recorded(store, run_id, lock, again=by_hand or (runtime.flow_run.run_count or 1) > 1)


def _recorded(store: RunStore, run_id: str, lock: int, *, again: bool) -> State[Any] | None:
    """The run, with its end written into its record whatever it is. `again` says that Prefect has started it, by a retry or by
    hand, and nobody has made a new attempt of it."""
    record = _begin(store, run_id, again=again)
    try:
        _require_wanted(store, run_id)
        if record.require_validation and record.attempt == 1:
            config = RunConfig.from_yaml(store.dir(run_id).config)
            require_validation(InferenceTests(store.home), config, record.environment_files)
        phase = _start_to_end(store, record, lock)
    except StopRequested as request:
        _end(store, run_id, "stopped")
        return Cancelled(message=f"stopped: {store.load(run_id).stop_reason or request}")
    except BaseException as error:
        if signalled := told_to_end(error):
            _end(store, run_id, "stopped")
            raise signalled from None
        _end(store, run_id, "failed", error)
        raise
    store.update(run_id, status="completed", phase=phase, ended_at=now())
    publish_report(store, run_id)
    return None


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
    with ServiceGroup(hold=(lock,), hurry=store.dir(record.run_id).hurry) as group:
        try:
            run = _Run(store, record, group)
            run.start()
            phase = run.supervise()
            run.evaluate()
            return phase
        finally:
            _hear_no_more()
            store.update(record.run_id, status="stopping", phase="stopping")
            _note_exits(store, record.run_id, group)  # what died by itself, before the others are ended
            _close(group, store.dir(record.run_id).hurry)
            _note_exits(store, record.run_id, group)
            _end_strays(store.dir(record.run_id).path)


def _hear_no_more() -> None:
    """The run is being ended: a signal that asks for it once more, as the runner's after our own look at the flow run's state,
    must not cut that short. Prefect puts its handler back by itself."""
    if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, lambda *_: None)


def _close(group: ServiceGroup, hurry: Path) -> None:
    """End the services. Without its engine the trainer can save nothing, and would ask until its grace is over."""
    impatience = threading.Timer(WITHOUT_ENGINE_S, hurry.touch)
    if "engine" in group.exited():
        impatience.start()
    group.close()
    impatience.cancel()


def _end_strays(folder: Path) -> None:
    """Children of the environment that left its process group."""
    for told in leftovers.end_all(leftovers.processes_under(folder).get(folder, [])):
        log.info("ended what the environment had left behind: %s", told)


class StopRequested(Exception):
    """The record or the server says that this run shall end. A cancellation normally comes as a signal; after an outage, or
    before the runner knows of the flow's process, it may not."""


def _begin(store: RunStore, run_id: str, *, again: bool) -> RunRecord:
    store.dir(run_id).hurry.unlink(missing_ok=True)
    begun: dict[str, Any] = {
        "status": "starting",
        "phase": "preparing",
        "error": None,
        "failed_service": None,
        "started_at": now(),
        "healthy_at": None,
        "ended_at": None,
        "services": {},
        "evaluation": {},
        "resumed": None,
        "flow_run_id": str(runtime.flow_run.id) if runtime.flow_run.id else None,
        "flow_pid": os.getpid(),
    }
    return store.update(run_id, **{**(next_attempt(store.load(run_id)) if again else {}), **begun})


def _require_wanted(store: RunStore, run_id: str) -> None:
    """Raises StopRequested when somebody has asked for the end: no service starts after that. Raises ProcessExitedError when
    the runner is gone."""
    reason = store.load(run_id).stop_reason
    if reason:
        raise StopRequested(reason)
    _check_own_state(runtime.flow_run.id)
    if os.getppid() != RUNNER_PID:
        raise ProcessExitedError(RUNNER_GONE)


def _note_exits(store: RunStore, run_id: str, group: ServiceGroup) -> None:
    known = store.load(run_id).services
    for name, code in group.exited().items():
        if name in known:
            store.update_service(run_id, name, state=f"exited ({code})")


def _end(store: RunStore, run_id: str, status: Status, error: BaseException | None = None) -> None:
    """Write how the run ended into its record."""
    reason, service = None, None
    if isinstance(error, SystemExit):  # logging to a runner that is gone ends the process
        reason = RUNNER_GONE
    elif error is not None:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, LachesisError):
            reason, service = str(error), error.details.get("service")
    if status == "stopped":
        asked = store.load(run_id).stop_reason or FROM_OUTSIDE
        reason = None if asked == BY_USER else asked
    services = exited(store.load(run_id).services)  # a second signal may have come before their ends were noted
    ended = {"status": status, "phase": status, "error": reason, "failed_service": service, "ended_at": now()}
    store.update(run_id, **ended, services=services)


class _Run:
    """The steps of one run, in order."""

    def __init__(self, store: RunStore, record: RunRecord, group: ServiceGroup) -> None:
        self.store, self.record, self.group, self.run_id = store, record, group, record.run_id
        self.folder = store.dir(record.run_id)
        check_profile(record.profile)
        found = Checkpoints(self.folder.checkpoints).to_resume()
        config = RunConfig.from_yaml(self.folder.config)
        resume = found.received(config.parts()) if found else None
        self.plan: Plan = make_plan(record, self.folder, config, resume=resume)
        self.plan.write()
        self.restarts = Restarts()
        self.numbers = {service: number for number, service in enumerate(self.plan.environments)}
        """What the living API knows the environments by."""
        self.met = len(self.numbers)
        """How many environments it has met."""
        self.forgotten: set[int] = set()
        self.flow_run_id: str | None = runtime.flow_run.id

    def start(self) -> None:
        """Each service needs those before it, except that the API needs no engine, and that the first environment, which the
        API lets in once the trainer is there, may be imported meanwhile: these start two at a time."""
        waiting, first = [], next(iter(self.numbers))
        for spec in self.plan.services:
            if spec.name not in ("engine", "api", first):
                self._wait(waiting)
            _require_wanted(self.store, self.run_id)
            start_service(self.group, spec, self.store, self.run_id)
            waiting.append(spec)
        self._wait(waiting)
        self.store.update(self.run_id, status="running", phase="training", healthy_at=now())

    def _wait(self, waiting: list[Any]) -> None:
        while waiting:
            spec = waiting.pop(0)
            self.store.update(self.run_id, phase=f"waiting for {spec.name}")
            wait_for_service(self.group, spec, self.store, self.run_id)
            _require_wanted(self.store, self.run_id)

    def supervise(self) -> str:
        """Until the trainer has made its last step; how it ended. Raises when a service dies too early or when told to stop."""
        progress = Progress(self.run_id, self.flow_run_id)
        total, watched = self.plan.config.env.total_steps, time.monotonic()
        moved, last_step = time.monotonic(), -1
        while True:
            health = self.group.unless_death(lambda: trainer_health(self.plan), {})
            step = int(health.get("step") or 0)
            self.group.unless_death(functools.partial(progress.publish, step, total), None)
            if step != last_step or any(map(self.group.running, self.numbers)):
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
                self.group.unless_death(lambda: _require_wanted(self.store, self.run_id), None)
            time.sleep(POLL_S)

    def _check_budget(self) -> None:
        """The time of the run, which only this process sees pass when the trainer hangs. Tokens and money are counted by the
        trainer, and all three by the monitor, which looks seldom, and not at all without a server."""
        self._stop_if(exceeded(self.plan.config.limits, spent(self.record, {})))

    def _stop_if(self, reason: str | None) -> None:
        """Raises StopRequested for a reason that is one."""
        if reason:
            self.store.update(self.run_id, stop_reason=reason)
            raise StopRequested(reason)

    def _ended(self) -> bool:
        """True when the trainer has ended after its last step. An environment that has made its last rollout may end first. Any
        other death ends the attempt, or the service is started again."""
        exited = self.group.exited()
        for name in sorted(exited, key=lambda one: ORDER.index(role(one))):
            code = exited[name]
            self.group.require_reaper()
            if name == "trainer" and code == 0:
                if self._finished():
                    return True
                newest = Checkpoints(self.folder.checkpoints).newest()
                raise ProcessExitedError(
                    f"the trainer was told to end, by somebody else, after step {newest.step if newest else 0} of "
                    f"{self.plan.config.env.total_steps}; `lachesis resume {self.run_id}` goes on"
                )
            if not (name in self.numbers and code == 0):
                self._restart(name, death(self.plan.service(name), code))
                return False
            if len(self.numbers) > 1:  # it has no more items; the others need not wait for its share
                self._forget(self.numbers[name])
        return False

    def _forget(self, number: int) -> None:
        """Tell the API, once, that this environment is gone."""
        if number not in self.forgotten:
            self.forgotten.add(number)
            forget_environment(self.plan, number)

    def _finished(self) -> bool:
        newest = Checkpoints(self.folder.checkpoints).newest()
        return newest is not None and newest.final

    def _restart(self, name: str, problem: ProcessExitedError) -> None:
        """What the table of `supervision.policy` says. Raises the problem when that is the end of the attempt."""
        pause_s = self.restarts.pause_s(name)
        if pause_s is None or (name in self.numbers and not (tallies.read(self.folder.tally_of(name)) or {}).get("groups")):
            raise problem
        log.warning("%s is started again in %.0f s: %s", name, pause_s, problem)
        self.store.update(self.run_id, phase=f"restarting {name}")
        try:
            self._watch_others(pause_s)
            if name == "api":
                self._restart_api()
            else:
                before = self.numbers[name]
                self._start_environment(name)
                self._forget(before)  # until now its share is kept for it
        except ProcessExitedError:
            if not self._finished():  # the trainer may have made its last step meanwhile
                raise
        self.store.update(self.run_id, phase="training")

    def _restart_api(self) -> None:
        """With new environments, as it remembers nothing."""
        for environment in self.numbers:
            self.group.stop(environment)
            self.group.forget(environment)
        self._start_again(self.plan.service("api"))
        self.met, self.forgotten = 0, set()
        for environment in self.numbers:
            self._start_environment(environment)

    def _start_environment(self, service: str) -> None:
        """From where training stands."""
        health, self.numbers[service] = trainer_health(self.plan), self.met
        self.met += 1
        name = self.plan.environments[service]
        groups = int(((health.get("mixture") or {}).get(name) if len(self.numbers) > 1 else health.get("groups")) or 0)
        self._start_again(self.plan.environment_again(service, groups=groups, number=self.numbers[service]))

    def _watch_others(self, seconds: float) -> None:
        """Wait, unless one of those dies that cannot be started again. Raises ProcessExitedError."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for spec in self.plan.services:
                if not DEATHS[role(spec.name)].pauses_s:
                    self.group.require(spec.name)
            time.sleep(POLL_S)

    def _start_again(self, spec: ServiceSpec) -> None:
        _require_wanted(self.store, self.run_id)
        start_service(self.group, spec, self.store, self.run_id)
        wait_for_service(self.group, spec, self.store, self.run_id)

    def _note_told(self, health: dict[str, Any]) -> None:
        told = {key: health[key] for key in ("resumed", "wandb_url", "wandb_error") if health.get(key)}
        if any(getattr(self.record, key) != value for key, value in told.items()):
            self.record = self.store.update(self.run_id, **told)

    def evaluate(self) -> None:
        """Both models on held-out items, at once; a failed evaluation is told, and the run stays completed."""
        if not self.plan.evaluations or not self.group.running("trainer"):
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
                wait_for_end(self.group, spec, needs=needed)
                known = self.store.load(self.run_id).evaluation
                when, _, other = which.partition("-")
                found = read_evaluation(self.folder.evaluation / which)
                named = {f"{other}/{key}": value for key, value in found.items()} if other else found
                self.store.update(self.run_id, evaluation={**known, when: {**known.get(when, {}), **named}})
            except LachesisError as error:
                log.warning("no evaluation %s training: %s", which, error)


def _check_own_state(flow_run_id: str | None) -> None:
    """Raises StopRequested when the server has this run cancelled or given up."""
    if flow_run_id is None:
        return
    try:
        state = ((PrefectApi().flow_run(flow_run_id) or {}).get("state") or {}).get("type")
    except ServerDownError:
        return  # an outage is no reason to stop training
    if state in ("CANCELLING", "CANCELLED", "CRASHED", "FAILED"):
        raise StopRequested(str(state).lower())
