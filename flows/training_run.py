"""Run one training run inside its flow: start the services, supervise them, evaluate models."""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

from prefect import runtime

from flows.held_out_evaluations import HeldOutEvaluations
from flows.service_restarter import ServiceRestarter
from flows.stop_requests import CHECK_INTERVAL_S, StopRequested, raise_if_stop_requested, throttle
from lachesis.base.errors import ProcessExitedError
from lachesis.base.timestamps import now_iso
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.profiles import adopt_profile_keys, check_profile
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.spending.budgets import compute_budget_usage, find_exceeded_budget
from lachesis.supervision.invalid_groups import DeadEnvironmentDetector
from lachesis.supervision.readiness import fetch_trainer_health
from lachesis.supervision.running_services import ServiceGroup, make_exit_error
from lachesis.supervision.services.plan import START_ORDER, ServicePlan, make_training_plan
from lachesis.supervision.services.spec import ServiceSpec, get_service_role
from tasks.processes import start_service, wait_for_service
from tasks.progress import ProgressArtifact, StepLog, log_addresses, renew_report
from tasks.run_as_task import run_as_task

log = logging.getLogger("lachesis.flow")
POLL_S = 0.5
# How long the trainer may wait for a batch after the environment has ended; its groups are queued.
DRAIN_TIMEOUT_S = 120.0
REPORT_INTERVAL_S = 15.0


class TrainingRun:
    """Perform the steps of one run in order."""

    def __init__(self, store: RunStore, record: RunRecord, group: ServiceGroup) -> None:
        self.store, self.record, self.group, self.run_id = store, record, group, record.run_id
        # The hashes of a large checkpoint may take minutes; until then the last check is recent.
        self.check_stop_request = throttle(self._raise_if_stop_requested)
        self.folder = store.dir(record.run_id)
        config = read_effective_config(self.folder)
        adopt_profile_keys(record.profile, backend=config.tinker.backend)
        check_profile(record.profile, backend=config.tinker.backend)
        checkpoint = Checkpoints(self.folder.checkpoints).find_resumable()
        if checkpoint:
            received_groups = checkpoint.get_groups_by_environment(
                config.build_environment_configs()
            )
        else:
            received_groups = None
        self.plan: ServicePlan = make_training_plan(
            record, self.folder, config, received_groups=received_groups
        )
        self.plan.write_files()
        self.restarter = ServiceRestarter(
            store, self.run_id, group, self.plan, self._raise_if_stop_requested
        )
        self.env_ids = self.restarter.env_ids
        self.flow_run_id: str | None = runtime.flow_run.id
        self._report_published_at = -REPORT_INTERVAL_S
        self.evaluations = HeldOutEvaluations(
            store, self.run_id, self.plan, group, self.check_stop_request
        )
        self.dead_environment_detector = DeadEnvironmentDetector(
            store, self.run_id, self.plan, received=received_groups
        )

    def start(self) -> None:
        """Start the services and wait until they are ready.

        Each service needs those before it, with two exceptions: the API needs no engine, and the
        first environment, which is admitted once the trainer is ready, may be imported meanwhile.
        These start two at a time.
        """
        starting_specs: list[ServiceSpec] = []
        first_environment = next(iter(self.env_ids))
        for spec in self.plan.services:
            if spec.name not in ("backend", "engine", "api", first_environment):
                self._wait_for_services(starting_specs)
            # The attempt has begun with a check, so that of the first service may be some seconds
            # old; the record is not read again for it.
            if spec is self.plan.services[0]:
                self.check_stop_request()
            else:
                self._raise_if_stop_requested()
            start_service(self.group, spec, self.store, self.run_id)
            starting_specs.append(spec)
        self._wait_for_services(starting_specs)
        self.store.update(self.run_id, status="running", phase="training", healthy_at=now_iso())
        self.evaluations.begin()

    def _wait_for_services(self, starting_specs: list[ServiceSpec]) -> None:
        while starting_specs:
            spec = starting_specs.pop(0)
            self.store.update(self.run_id, phase=f"waiting for {spec.name}")
            wait_for_service(
                self.group, spec, self.store, self.run_id, on_poll=self.check_stop_request
            )
            self._raise_if_stop_requested()

    def supervise(self) -> str:
        """Supervise the services until the trainer has made its last step, and return how it ended.

        On the page of the run this is the task `train`, which lasts as long as training.

        Raises:
            ProcessExitedError: A service has died and cannot be restarted.
            StopRequested: The run should end.
        """
        return str(run_as_task("train", self._supervise))

    def _supervise(self) -> str:
        if self.flow_run_id is not None:
            log_them = functools.partial(log_addresses, self.store, self.run_id, self.flow_run_id)
            self.group.call_unless_service_dies(log_them, None)
        step_log = StepLog(self.folder, self.plan.config.env.total_steps)
        try:
            return self._watch_training(step_log)
        finally:
            step_log.finish()

    def _watch_training(self, step_log: StepLog) -> str:
        progress = ProgressArtifact(self.run_id, self.flow_run_id)
        total, checked_at = self.plan.config.env.total_steps, time.monotonic()
        progressed_at, last_step = time.monotonic(), -1
        while True:
            health: dict[str, Any] = self.group.call_unless_service_dies(
                lambda: fetch_trainer_health(self.plan), {}
            )
            step = int(health.get("step") or 0)
            publish = functools.partial(progress.publish, step, total)
            self.group.call_unless_service_dies(publish, None)
            if step_log.update():
                self._publish_report()
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
                self._check_run()
            time.sleep(POLL_S)

    def _publish_report(self) -> None:
        """Renew the report among the artifacts, at most every few seconds."""
        if time.monotonic() - self._report_published_at < REPORT_INTERVAL_S:
            return
        self._report_published_at = time.monotonic()
        self.group.call_unless_service_dies(
            functools.partial(renew_report, self.store, self.run_id), None
        )

    def _check_run(self) -> None:
        """Raise StopRequested if a budget is used up or the run should end."""
        self._check_budget()
        self.dead_environment_detector.check()
        self.group.call_unless_service_dies(self._raise_if_stop_requested, None)

    def _raise_if_stop_requested(self) -> None:
        raise_if_stop_requested(self.store, self.run_id)

    def _check_budget(self) -> None:
        """Check the run's duration, which only this process measures when the trainer hangs.

        The trainer counts tokens and money. The monitor checks all three, but less often, and not
        without a server.
        """
        self._stop_if(
            find_exceeded_budget(self.plan.config.limits, compute_budget_usage(self.record, {}))
        )

    def _stop_if(self, reason: str | None) -> None:
        """Raise StopRequested if there is a reason."""
        if reason:
            self.store.update(self.run_id, stop_reason=reason)
            raise StopRequested(reason)

    def _handle_exits(self) -> bool:
        """Return True if the trainer has ended after its last step.

        An environment that has made its last rollout may end first. After any other death the
        service is restarted, or the attempt ends.
        """
        exit_codes = self.group.collect_exit_codes()
        names = exit_codes.keys() - self.evaluations.service_names
        for name in sorted(names, key=lambda service: START_ORDER.index(get_service_role(service))):
            code = exit_codes[name]
            self.group.require_reaper()
            if name == "trainer" and code == 0:
                if self._is_finished():
                    return True
                newest = Checkpoints(self.folder.checkpoints).find_newest()
                raise ProcessExitedError(
                    "the trainer was stopped by another program after step "
                    f"{newest.step if newest else 0} of {self.plan.config.env.total_steps}; "
                    f"`lachesis resume {self.run_id}` continues"
                )
            if not (name in self.env_ids and code == 0):
                self._restart(name, make_exit_error(self.plan.get_service(name), code))
                return False
            # It has no more items, so the others need not wait for its share.
            if len(self.env_ids) > 1:
                self.restarter.disconnect(self.env_ids[name])
        return False

    def _is_finished(self) -> bool:
        newest = Checkpoints(self.folder.checkpoints).find_newest()
        # A run that was given more steps has the final checkpoint of its former last step.
        total_steps = self.plan.config.env.total_steps
        return newest is not None and newest.is_final and newest.step >= total_steps

    def _restart(self, name: str, problem: ProcessExitedError) -> None:
        """Restart a service, or raise the problem if it ends the attempt."""
        self.dead_environment_detector.remember_usable()
        try:
            self.restarter.restart(name, problem)
        except ProcessExitedError:
            if not self._is_finished():  # The trainer may have made its last step meanwhile.
                raise

    def _record_trainer_info(self, health: dict[str, Any]) -> None:
        trainer_info = {
            key: health[key] for key in ("resumed", "wandb_url", "wandb_error") if health.get(key)
        }
        if any(getattr(self.record, key) != value for key, value in trainer_info.items()):
            if trainer_info.get("wandb_url", self.record.wandb_url) != self.record.wandb_url:
                log.info("W&B: %s", trainer_info["wandb_url"])
            self.record = self.store.update(self.run_id, **trainer_info)

    def evaluate_held_out(self) -> None:
        """Evaluate the trained model on held-out items, and wait for the result of the base model.

        A failed evaluation is counted with its reason, and the run still completes.

        Raises:
            StopRequested: The run should end.
        """
        if not self.plan.evaluations or not self.group.is_running("trainer"):
            return
        self.store.update(self.run_id, phase="evaluating")
        for environment in self.env_ids:
            self.group.stop(environment)
        self.evaluations.finish()
