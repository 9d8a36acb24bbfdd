"""Run one attempt of a training run: start its services, and supervise them.

Nothing here knows who watches. A supervisor passes `show_step`, which shows a step while it lasts,
`ask_stop`, which raises `StopRequested` if the run should end, and `report`, which is told how far
training is.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from lachesis.base.errors import ProcessExitedError
from lachesis.base.timestamps import now_iso
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.profiles import adopt_profile_keys, check_profile
from lachesis.runs.end_causes import EndCause
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.spending.budgets import compute_budget_usage, find_exceeded_limit
from lachesis.supervision.invalid_groups import DeadEnvironmentDetector
from lachesis.supervision.readiness import RunServices, ShowStep, fetch_trainer_health
from lachesis.supervision.restarts import ServiceRestarter
from lachesis.supervision.running_services import ServiceGroup, make_exit_error
from lachesis.supervision.services.order import ROLES, START_ORDER, get_service_role
from lachesis.supervision.services.plan import ServicePlan, make_training_plan
from lachesis.supervision.services.spec import ServiceSpec
from lachesis.supervision.stop_requests import CHECK_INTERVAL_S, StopCheck, StopRequested

log = logging.getLogger("lachesis.flow")
POLL_S = 0.5
# How long the trainer may wait for a batch after the environment has ended; its groups are queued.
DRAIN_TIMEOUT_S = 120.0


def do_step(name: str, work: Callable[[], Any]) -> Any:
    """Do a step that nobody is shown."""
    return work()


class TrainingRun:
    """Perform the steps of one attempt in order.

    Args:
        store: The runs of this home.
        record: The run.
        group: Its services, none of which has started.
        show_step: Does a step and shows it under its name.
        ask_stop: Raises `StopRequested` if the run should end; see `StopCheck`.
        report: Is called with the last step and the number of steps about twice a second. It may
            take a while.
    """

    def __init__(
        self,
        store: RunStore,
        record: RunRecord,
        group: ServiceGroup,
        *,
        show_step: ShowStep = do_step,
        ask_stop: Callable[[], None] = lambda: None,
        report: Callable[[int, int], None] = lambda step, total: None,
    ) -> None:
        self.store, self.record, self.group, self.run_id = store, record, group, record.run_id
        self.show_step, self.report = show_step, report
        # What the trainer has last said that all attempts have used.
        self.spent: dict[str, Any] = {}
        # The hashes of a large checkpoint may take minutes; until then the last check is recent.
        self.stop_check = StopCheck(store, record.run_id, ask_stop)
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
        self.services = RunServices(group, store, self.run_id, show_step)
        self.restarter = ServiceRestarter(self.services, self.plan, self.stop_check)
        self.env_ids = self.restarter.env_ids
        self.dead_environment_detector = DeadEnvironmentDetector(
            store, record, self.plan, received=received_groups
        )

    def start(self) -> None:
        """Start the services and wait until they are ready.

        Each service needs those before it, with two exceptions: the API needs no engine, and the
        first environment, which is admitted once the trainer is ready, may be imported meanwhile.
        These start two at a time.
        """
        try:
            self._start_in_order()
        except BaseException:
            self.services.write()
            raise
        self.services.write(status="running", phase="training", healthy_at=now_iso())

    def _start_in_order(self) -> None:
        """Start the services in order, each once those before it are ready."""
        starting_specs: list[ServiceSpec] = []
        at_once = [role.name for role in ROLES if role.starts_at_once]
        # The first environment starts while the trainer is not ready yet.
        at_once.append(next(iter(self.env_ids)))
        for spec in self.plan.services:
            if spec.name not in at_once:
                self._wait_for_services(starting_specs)
            # The attempt has begun with a check, so that of the first service may be some seconds
            # old; the record is not read again for it.
            if spec is self.plan.services[0]:
                self.stop_check.check_now_and_then()
            else:
                self.stop_check.check()
            self.services.start(spec)
            starting_specs.append(spec)
        self._wait_for_services(starting_specs)

    def _wait_for_services(self, starting_specs: list[ServiceSpec]) -> None:
        while starting_specs:
            spec = starting_specs.pop(0)
            self.services.write(phase=f"waiting for {spec.name}")
            self.services.wait_until_ready(spec, on_poll=self.stop_check.check_now_and_then)
            self.stop_check.check()

    def supervise(self) -> None:
        """Supervise the services until the trainer has made all steps.

        The step `train` lasts until the last step is saved; held-out evaluations that are due then
        are a step of their own.

        Raises:
            ProcessExitedError: A service has died and cannot be restarted.
            StopRequested: The run should end.
        """
        if not self.show_step("train", lambda: self._watch_training(until="evaluation")):
            self.store.update(self.run_id, phase="evaluating")
            self.show_step("evaluate held-out items", self._watch_training)

    def _watch_training(self, until: str = "") -> bool:
        """Return True once training has ended, or False once the trainer waits for `until`."""
        total, checked_at = self.plan.config.env.total_steps, time.monotonic()
        progressed_at = time.monotonic()
        while True:
            health: dict[str, Any] = self.group.call_unless_service_dies(self._ask_trainer, {})
            # Groups may be queued, and a step may take long: only waiting for rollouts counts.
            if health.get("waiting_for") != "rollouts" or self._is_environment_running():
                progressed_at = time.monotonic()
            if time.monotonic() - progressed_at > DRAIN_TIMEOUT_S:
                step = int(health.get("step") or 0)
                sentence = f"its environments ended after {step} of {total} steps"
                raise StopRequested(EndCause.NO_MORE_ITEMS, sentence)
            self._record_trainer_info(health)
            if health.get("phase") == "finished" or self._handle_exits():
                self.report(total, total)
                return True
            if until and health.get("waiting_for") == until:
                return False
            self._check_budget()
            if time.monotonic() - checked_at > CHECK_INTERVAL_S:
                checked_at = time.monotonic()
                self._check_run()
            time.sleep(POLL_S)

    def _is_environment_running(self) -> bool:
        return any(map(self.group.is_running, self.env_ids))

    def _ask_trainer(self) -> dict[str, Any]:
        """Return the health report of the trainer, and report its progress."""
        health = fetch_trainer_health(self.plan)
        self.spent = health.get("spent") or self.spent
        self.report(int(health.get("step") or 0), self.plan.config.env.total_steps)
        return health

    def _check_run(self) -> None:
        """Raise an error if no environment makes usable groups, or the run should end."""
        self.dead_environment_detector.check()
        self.group.call_unless_service_dies(self.stop_check.check, None)

    def _check_budget(self) -> None:
        """Raise StopRequested if a budget is used up; nobody else looks at budgets.

        The duration is measured here, also while the trainer hangs. Tokens and money are what the
        trainer has last reported, of all attempts.
        """
        usage = compute_budget_usage(self.record, {}, live=self.spent)
        if exceeded := find_exceeded_limit(self.plan.config.limits, usage):
            raise StopRequested(EndCause.BUDGET, exceeded.describe())

    def _handle_exits(self) -> bool:
        """Return True if the trainer has ended after its last step.

        An environment that has made its last rollout may end first. After any other death the
        service is restarted, or the attempt ends.
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
