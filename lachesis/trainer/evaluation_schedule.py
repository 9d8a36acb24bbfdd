"""Schedule held-out evaluations during training, keep their weights, and collect their results.

The trainer decides when an evaluation is due: at each step that is a multiple of `steps_per_eval`,
including step 0. Environments ask for it (see `lachesis.environment_process.requested_evaluations`)
and run it beside training, so no step waits. All environments of a run evaluate the same weights;
the next evaluation begins when they have ended, so that at most one older version of the weights is
kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tinker

from lachesis.base.reward_values import is_score
from lachesis.base.tinker_client import call_sdk
from lachesis.inference_server.token_usage import Usage
from lachesis.runs.held_out_results import HeldOutPoint, record_failed_evaluation, to_point
from lachesis.runs.metrics import FAILED_KEY

log = logging.getLogger(__name__)
# How long a request for the next evaluation may stay open.
LONG_POLL_S = 20.0
# An evaluation without a heartbeat for this long is given up.
HEARTBEAT_TIMEOUT_S = 120.0
# How long after the last step an environment may take to begin an evaluation that is due.
BEGIN_TIMEOUT_S = 30.0
# How long after the last step a running evaluation may take to end.
FINISH_TIMEOUT_S = 600.0
# After this many updates one token is sampled from the weights of an evaluation, because servers
# may drop idle weights.
UPDATES_PER_KEEPALIVE = 8
MAX_ATTEMPTS = 2
MAX_METRICS, MAX_NAME_LENGTH = 64, 80
# Names under `eval/` that are written here.
RESERVED_NAMES = ("step", "failed", "items", "low", "high", "seconds")


class EvaluationEndedError(Exception):
    """The evaluation has ended or was given up, and its weights are gone."""


@dataclass
class EvaluationRound:
    """Hold one evaluation by all environments of a run; `waiting` are those that have not begun."""

    step: int
    sampler: tinker.SamplingClient
    waiting_environments: list[str]
    started_at: float = field(default_factory=time.monotonic)
    updates: int = 0


@dataclass
class RunningEvaluation:
    """Hold the part of one environment in a round."""

    environment: str
    attempts: int
    heartbeat_at: float = field(default_factory=time.monotonic)


class EvaluationScheduler:
    """Schedule the held-out evaluations of one attempt of a run.

    Args:
        environments: The names of the run's environments, its own first.
        every_steps: Steps between evaluations; 0 or less for none.
        excluded_step: The last step of the run, if another process evaluates it.
        usage: Counts the tokens that are requested here.
        failures_file: The JSONL file for the reasons of failed evaluations.
    """

    def __init__(
        self,
        environments: Sequence[str] = ("",),
        *,
        every_steps: int = 0,
        excluded_step: int | None = None,
        usage: Usage | None = None,
        failures_file: Path | None = None,
    ) -> None:
        self.environments, self.every_steps, self.excluded_step = (
            list(environments),
            every_steps,
            excluded_step,
        )
        self.usage, self.failures_file = usage or Usage(), failures_file
        self.num_failed = 0
        # Whether no further evaluation will be due.
        self.is_over = every_steps <= 0
        # Results of the run's own environment that the trainer has not taken yet.
        self.results: list[HeldOutPoint] = []
        self._evaluated_steps: set[int] = set()
        # Environments that have no evaluation; they are asked once.
        self._excluded_environments: set[str] = set()
        self._round: EvaluationRound | None = None
        self._running: dict[str, RunningEvaluation] = {}
        self._unwritten_metrics: dict[str, float] = {}
        self._change_event = asyncio.Event()
        self._keepalive_tasks: set[asyncio.Task[Any]] = set()

    @property
    def step_under_way(self) -> int | None:
        """Return the step whose weights are being evaluated now."""
        if self._round:
            return self._round.step
        return None

    @property
    def step_awaited(self) -> int | None:
        """Return the step whose result is not in a checkpoint yet.

        Its evaluation is running, or has ended and its result was not taken.
        """
        if self.results:
            return self.results[0].step
        return self.step_under_way

    def restore_from_metrics(self, steps: Iterable[Mapping[str, Any]], first_step: int) -> None:
        """Restore what an earlier attempt has evaluated when training resumes from `first_step`.

        Lines after `first_step` will be written again. A result on one of them stays valid if its
        weights are not newer than `first_step`; it moves to the next line.
        """
        prefixes = ["", *(f"environments/{name}/" for name in self.environments[1:])]
        for line in steps:
            for prefix in prefixes:
                evaluated_step = line.get(f"{prefix}eval/step")
                if evaluated_step is None or evaluated_step > first_step:
                    continue
                if not prefix:
                    self._evaluated_steps.add(int(evaluated_step))
                if line["step"] > first_step:
                    self._unwritten_metrics |= {
                        key: value
                        for key, value in line.items()
                        if key.startswith(f"{prefix}eval/") and key != FAILED_KEY
                    }

    def start_round_if_due(self, step: int, sampler: tinker.SamplingClient) -> None:
        """Begin an evaluation of these weights if one is due; call it after each step and before
        the first.
        """
        self._give_up_silent()
        if self._round is not None:
            self._keep_weights_alive(self._round)
        if not self._is_due(step):
            return
        if self._round is not None:
            self._give_up_waiting("the environment did not begin it before the next one was due")
        if self._round is not None:
            log.warning(
                "no evaluation of step %d: that of step %d is still running",
                step,
                self._round.step,
            )
            return
        self._evaluated_steps.add(step)
        environments = [
            name for name in self.environments if name not in self._excluded_environments
        ]
        if not environments:
            return
        self._round = EvaluationRound(step, sampler, environments)
        self._wake_waiters()

    async def wait_for_next(self, environment: str, wait_s: float = LONG_POLL_S) -> dict[str, Any]:
        """Wait until this environment has an evaluation to run, and begin it.

        Returns:
            Its `id` and the `step` of its weights; `{"over": True}` if there will be no more; `{}`
                if there was none within `wait_s` seconds.
        """
        deadline = time.monotonic() + wait_s
        while True:
            change_event = self._change_event
            offer = self._offer_evaluation(environment or self.environments[0])
            if offer or self.is_over:
                return offer or {"over": True}
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await change_event.wait()
            except TimeoutError:
                return {}

    def get_sampler(self, evaluation_id: str) -> tinker.SamplingClient:
        """Return the weights of an evaluation, or raise EvaluationEndedError."""
        self.record_heartbeat(evaluation_id)
        assert self._round is not None
        return self._round.sampler

    def record_heartbeat(self, evaluation_id: str) -> None:
        """Record a heartbeat of an evaluation, or raise EvaluationEndedError."""
        running = self._running.get(evaluation_id)
        if running is None or self._round is None:
            raise EvaluationEndedError(f"evaluation {evaluation_id[:40]} has ended or was given up")
        running.heartbeat_at = time.monotonic()

    def finish(self, evaluation_id: str, report: Mapping[str, Any]) -> None:
        """Record the metrics of an evaluation or why it failed, or raise EvaluationEndedError."""
        self.record_heartbeat(evaluation_id)
        assert self._round is not None
        running, step = self._running.pop(evaluation_id), self._round.step
        if report.get("is_last"):
            self._excluded_environments.add(running.environment)
        metrics = _parse_metrics(report.get("metrics"))
        if report.get("error") or not metrics:
            self._record_failure(
                running.environment, step, str(report.get("error") or "it gave no metrics")
            )
        else:
            self._accept_result(running.environment, step, metrics, report)
        self._close_if_done()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics that have arrived since the last call, for the line of a step."""
        metrics, self._unwritten_metrics = self._unwritten_metrics, {}
        return metrics

    async def wait_for_last_round(self, stop: asyncio.Event) -> None:
        """Wait after the last step for an evaluation that is due or running, unless it is dead.

        One that has not ended after FINISH_TIMEOUT_S seconds, or when `stop` is set, counts as
        failed.
        """
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        while self._round is not None and not stop.is_set() and time.monotonic() < deadline:
            if time.monotonic() - self._round.started_at > BEGIN_TIMEOUT_S:
                self._give_up_waiting(
                    f"the environment did not begin it within {BEGIN_TIMEOUT_S:g} s"
                )
            self._give_up_silent()
            change_event = self._change_event
            try:
                async with asyncio.timeout(1.0):
                    await change_event.wait()
            except TimeoutError:
                continue
        timeout_reason = f"it had not ended {FINISH_TIMEOUT_S:g} s after the last step"
        self._give_up_all("the run was stopped" if stop.is_set() else timeout_reason)
        self.is_over = True
        self._wake_waiters()

    # --- one round

    def _is_due(self, step: int) -> bool:
        if self.is_over or step % self.every_steps or step == self.excluded_step:
            return False
        return step not in self._evaluated_steps

    def _offer_evaluation(self, environment: str) -> dict[str, Any]:
        """Return an evaluation to run, or nothing.

        An environment that asks while its evaluation is running was restarted: it may try again.
        """
        if self._round is None:
            return {}
        attempts = 1
        lost_ids = [
            evaluation_id
            for evaluation_id, running in self._running.items()
            if running.environment == environment
        ]
        if lost_ids:
            attempts += self._running.pop(lost_ids[0]).attempts
            if attempts > MAX_ATTEMPTS:
                self._record_failure(
                    environment,
                    self._round.step,
                    f"its process ended {MAX_ATTEMPTS} times during it",
                )
                self._close_if_done()
                return {}
        elif environment in self._round.waiting_environments:
            self._round.waiting_environments.remove(environment)
        else:
            return {}
        evaluation_id = secrets.token_hex(8)
        self._running[evaluation_id] = RunningEvaluation(environment, attempts)
        return {"id": evaluation_id, "step": self._round.step}

    def _accept_result(
        self, environment: str, step: int, metrics: dict[str, float], report: Mapping[str, Any]
    ) -> None:
        items = report.get("items")
        if is_score(items) and items and "eval/items" not in metrics:
            metrics["eval/items"] = float(items)
        is_own = environment == self.environments[0]
        point = to_point(metrics, step)
        if point is not None:
            point_values = point.model_dump(exclude_none=True)
            metrics |= {f"eval/{name}": value for name, value in point_values.items()}
            if is_own:
                self.results.append(point)
        metrics["eval/step"] = step
        if is_score(report.get("seconds")):
            metrics["eval/seconds"] = round(float(report["seconds"]), 3)
        prefix = "" if is_own else f"environments/{environment}/"
        self._unwritten_metrics |= {f"{prefix}{key}": value for key, value in metrics.items()}
        log.info("evaluation of step %d: %s", step, json.dumps(metrics))

    def _record_failure(self, environment: str, step: int, reason: str) -> None:
        self.num_failed += 1
        self._unwritten_metrics["eval/failed"] = self._unwritten_metrics.get("eval/failed", 0) + 1
        log.warning("the evaluation of step %d failed: %s; training continues", step, reason)
        if self.failures_file is None:
            return
        try:
            record_failed_evaluation(self.failures_file, step, environment, reason)
        except Exception as error:  # The reason is in the log.
            log.warning("the reason could not be stored: %s", error)

    def _give_up_silent(self) -> None:
        """Give up evaluations whose process is gone or does not respond."""
        for evaluation_id, running in list(self._running.items()):
            silent_s = time.monotonic() - running.heartbeat_at
            if silent_s > HEARTBEAT_TIMEOUT_S and self._round is not None:
                del self._running[evaluation_id]
                reason = f"its process has sent no heartbeat for {silent_s:.0f} s"
                self._record_failure(running.environment, self._round.step, reason)
        self._close_if_done()

    def _give_up_waiting(self, reason: str) -> None:
        if self._round is None:
            return
        for environment in self._round.waiting_environments:
            self._record_failure(environment, self._round.step, reason)
        self._round.waiting_environments.clear()
        self._close_if_done()

    def _give_up_all(self, reason: str) -> None:
        """Give up the rest of the round, whether it has begun or not."""
        if self._round is None:
            return
        for running in self._running.values():
            self._record_failure(running.environment, self._round.step, reason)
        self._running.clear()
        self._give_up_waiting(reason)

    def _close_if_done(self) -> None:
        if self._round is not None and not self._round.waiting_environments and not self._running:
            self._round = None
            self._wake_waiters()

    def _keep_weights_alive(self, round_: EvaluationRound) -> None:
        """Sample a token from the weights of a round now and then, so that no server drops them."""
        round_.updates += 1
        if round_.updates % UPDATES_PER_KEEPALIVE:
            return
        self.usage.record_logprob_request(1)
        task = asyncio.ensure_future(
            call_sdk(round_.sampler, "compute_logprobs", tinker.ModelInput.from_ints([0]))
        )
        self._keepalive_tasks.add(task)
        task.add_done_callback(self._finish_keepalive)

    def _finish_keepalive(self, task: asyncio.Task[Any]) -> None:
        self._keepalive_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.warning("sampling to keep an evaluation's weights failed: %r", task.exception())

    def _wake_waiters(self) -> None:
        self._change_event.set()
        self._change_event = asyncio.Event()


def _parse_metrics(raw_metrics: object) -> dict[str, float]:
    """Return the finite numbers of an environment's metrics under `eval/NAME`."""
    metrics: dict[str, float] = {}
    for key, value in raw_metrics.items() if isinstance(raw_metrics, Mapping) else ():
        name = str(key).removeprefix("eval/")[:MAX_NAME_LENGTH]
        if (
            is_score(value)
            and name
            and len(metrics) < MAX_METRICS
            and (name == "items" or name not in RESERVED_NAMES)
        ):
            metrics[f"eval/{name}"] = float(value)
    return metrics
