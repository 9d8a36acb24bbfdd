"""Schedule the held-out evaluations of a run, keep their weights, and collect their results.

An evaluation is due at step 0, at each multiple of `steps_per_eval`, and at the last step; where
training does not begin with the base model, that model is evaluated once, when nothing else is.
Environments ask for evaluations (see `lachesis.environment_process.requested_evaluations`) and run
them beside training, so no step waits. All environments of a run evaluate the same weights; the
next evaluation begins when they have ended, so that at most one older version of the weights is
kept. An environment that gives no sign of life, and an evaluation that reaches its deadline, are
given up.
"""

import asyncio
import contextlib
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
from lachesis.runs.held_out_results import (
    BASE_PREFIX,
    OWN_PREFIX,
    HeldOutPoint,
    is_evaluation_key,
    parse_reported_metrics,
    record_failed_evaluation,
    to_point,
)
from lachesis.runs.metrics import FAILED_KEY

log = logging.getLogger(__name__)
# How long a request for the next evaluation may stay open.
LONG_POLL_S = 20.0
# An environment that has sent nothing for this long has no part in an evaluation any more.
HEARTBEAT_TIMEOUT_S = 120.0
# How long an evaluation may take.
DEADLINE_S = 3600.0
# After this many updates one token is sampled from the weights of an evaluation, because servers
# may drop idle weights.
UPDATES_PER_KEEPALIVE = 8
MAX_ATTEMPTS = 2


class EvaluationEndedError(Exception):
    """The evaluation has ended or was given up, and its weights are gone."""


@dataclass
class EnvironmentPart:
    """Hold the part of one environment in an evaluation; it has no `id` until it begins."""

    id: str = ""
    attempts: int = 0


@dataclass
class EvaluationRound:
    """Hold one evaluation by all environments of a run; `parts` are those that have not ended."""

    step: int
    sampler: tinker.SamplingClient
    parts: dict[str, EnvironmentPart]
    is_base: bool = False
    started_at: float = field(default_factory=time.monotonic)
    updates: int = 0

    @property
    def model(self) -> str:
        """Return whose weights are evaluated, in words."""
        if self.is_base:
            return "the base model"
        return f"step {self.step}"


class EvaluationScheduler:
    """Schedule the held-out evaluations of one attempt of a run.

    Args:
        environments: The names of the run's environments, its own first.
        every_steps: Steps between evaluations; 0 or less for none.
        last_step: The step that is evaluated beside step 0 whatever `every_steps` is, if any.
        base_sampler: The base model, if it is evaluated apart from step 0.
        usage: Counts the tokens that are requested here.
        failures_file: The JSONL file for the reasons of failed evaluations.
    """

    def __init__(
        self,
        environments: Sequence[str] = ("",),
        *,
        every_steps: int = 0,
        last_step: int | None = None,
        base_sampler: tinker.SamplingClient | None = None,
        usage: Usage | None = None,
        failures_file: Path | None = None,
    ) -> None:
        self.environments = list(environments)
        self.every_steps, self.last_step = every_steps, last_step
        self.usage, self.failures_file = usage or Usage(), failures_file
        # Whether no further evaluation will be due.
        self.is_over = every_steps <= 0 and last_step is None and base_sampler is None
        # Results of the run's own environment that the trainer has not taken yet.
        self.results: list[HeldOutPoint] = []
        self._base_sampler = base_sampler
        self._evaluated_steps: set[int] = set()
        # Environments that have no evaluation; they are asked once.
        self._excluded_environments: set[str] = set()
        self._round: EvaluationRound | None = None
        # The weights that are evaluated next; those of the last step wait for others.
        self._next: tuple[int, tinker.SamplingClient] | None = None
        # When each environment has last sent something. Before the first step it may still load its
        # data, so that this begins with a step.
        self._heard_at: dict[str, float] = {}
        # What has arrived; results with the same names do not fit one line of the metrics.
        self._unwritten_metrics: list[dict[str, float]] = []
        self._change_event = asyncio.Event()
        self._keepalive_tasks: set[asyncio.Task[Any]] = set()

    @property
    def step_under_way(self) -> int | None:
        """Return the step whose weights are being evaluated now."""
        if self._round and not self._round.is_base:
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
        for line in steps:
            for name, evaluated_step in line.items():
                prefix, _, end = name.rpartition("/")
                is_result = end == "step" and is_evaluation_key(name)
                if not is_result or evaluated_step is None or evaluated_step > first_step:
                    continue
                prefix += "/"
                if prefix == OWN_PREFIX:
                    self._evaluated_steps.add(int(evaluated_step))
                elif prefix == BASE_PREFIX:
                    self._base_sampler = None
                if line["step"] > first_step:
                    self._add_unwritten(
                        {
                            key: value
                            for key, value in line.items()
                            if key.startswith(prefix) and key != FAILED_KEY
                        }
                    )

    def start_round_if_due(self, step: int, sampler: tinker.SamplingClient) -> None:
        """Begin an evaluation if one is due: call it before step 1 and after each step."""
        if self._round is not None:
            self._keep_weights_alive(self._round)
        self._give_up_dead_parts()
        if self._is_due(step):
            if self._round is None or step == self.last_step:
                self._evaluated_steps.add(step)
                self._next = (step, sampler)
            else:
                under_way = self._round.model
                log.warning("no evaluation of step %d: that of %s is running", step, under_way)
        self._start_next_round()

    async def wait_for_next(self, environment: str, wait_s: float = LONG_POLL_S) -> dict[str, Any]:
        """Wait until this environment has an evaluation to run, and begin it.

        Returns:
            Its `id`, the `step` of its weights and whether they are those of the base model
                (`is_base`); `{"over": True}` if there will be no more; `{}` if there was none
                within `wait_s` seconds.
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
        return self._find_round(evaluation_id)[0].sampler

    def record_heartbeat(self, evaluation_id: str) -> None:
        """Record a heartbeat of an evaluation, or raise EvaluationEndedError."""
        self._find_round(evaluation_id)

    def finish(self, evaluation_id: str, report: Mapping[str, Any]) -> None:
        """Record the metrics of an evaluation or why it failed, or raise EvaluationEndedError."""
        round_, environment = self._find_round(evaluation_id)
        if report.get("is_last"):
            self._excluded_environments.add(environment)
        metrics = parse_reported_metrics(report.get("metrics"))
        if report.get("error") or not metrics:
            self._give_up(environment, str(report.get("error") or "it gave no metrics"))
        else:
            self._accept_result(round_, environment, metrics, report)
            self._end_part(environment)

    def take_metrics(self) -> dict[str, float]:
        """Return metrics that have arrived, for the line of a step; nothing once all are taken."""
        return self._unwritten_metrics.pop(0) if self._unwritten_metrics else {}

    async def wait_for_last_round(self, stop: asyncio.Event) -> None:
        """Wait after the last step for due evaluations; when `stop` is set, they have failed.

        The base model is evaluated now if it was not before.
        """
        while True:
            if not stop.is_set():
                self._start_next_round()
            if self._round is None:
                break
            self._heard_at = dict.fromkeys(self.environments, time.monotonic()) | self._heard_at
            self._give_up_dead_parts("the run was stopped" if stop.is_set() else None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(self._round is not None)):
                    await self._change_event.wait()
        self.is_over = True
        self._wake_waiters()

    # --- one round

    def _is_due(self, step: int) -> bool:
        is_end = self.last_step is not None and step in (0, self.last_step)
        is_multiple = self.every_steps > 0 and step % self.every_steps == 0
        return not self.is_over and step not in self._evaluated_steps and (is_end or is_multiple)

    def _start_round(
        self, step: int, sampler: tinker.SamplingClient, *, is_base: bool = False
    ) -> None:
        """Begin an evaluation of these weights by each environment that has any."""
        parts = {
            name: EnvironmentPart()
            for name in self.environments
            if name not in self._excluded_environments
        }
        if parts:
            self._round = EvaluationRound(step, sampler, parts, is_base)
            self._wake_waiters()

    def _start_next_round(self) -> None:
        """Begin the due evaluation, or else that of the base model, if none is under way."""
        if self._round is None and self._next is not None:
            (step, sampler), self._next = self._next, None
            self._start_round(step, sampler)
        if self._round is None and self._base_sampler is not None:
            base_sampler, self._base_sampler = self._base_sampler, None
            self._start_round(0, base_sampler, is_base=True)

    def _offer_evaluation(self, environment: str) -> dict[str, Any]:
        """Return an evaluation to run, or nothing.

        An environment that asks while its evaluation is running was restarted: it may try again.
        """
        self._heard_at[environment] = time.monotonic()
        if self._round is None or environment not in self._round.parts:
            return {}
        part = self._round.parts[environment]
        if part.attempts == MAX_ATTEMPTS:
            self._give_up(environment, f"its process ended {MAX_ATTEMPTS} times during it")
            return {}
        part.id, part.attempts = secrets.token_hex(8), part.attempts + 1
        return {"id": part.id, "step": self._round.step, "is_base": self._round.is_base}

    def _find_round(self, evaluation_id: str) -> tuple[EvaluationRound, str]:
        """Return the round of an evaluation and its environment, which is heard by this."""
        for environment, part in self._round.parts.items() if self._round else ():
            if self._round and part.id == evaluation_id:
                self._heard_at[environment] = time.monotonic()
                return self._round, environment
        raise EvaluationEndedError(f"evaluation {evaluation_id[:40]} has ended or was given up")

    def _accept_result(
        self,
        round_: EvaluationRound,
        environment: str,
        metrics: dict[str, float],
        report: Mapping[str, Any],
    ) -> None:
        """Keep the metrics of an evaluation for the next line and the checkpoint."""
        items = report.get("items")
        if is_score(items) and items and "eval/items" not in metrics:
            metrics["eval/items"] = float(items)
        point = to_point(metrics, round_.step)
        if point is not None:
            point_values = point.model_dump(exclude_none=True)
            metrics |= {f"eval/{name}": value for name, value in point_values.items()}
            if environment == self.environments[0] and not round_.is_base:
                self.results.append(point)
        metrics["eval/step"] = round_.step
        if is_score(report.get("seconds")):
            metrics["eval/seconds"] = round(float(report["seconds"]), 3)
        prefix = self._get_prefix(environment, is_base=round_.is_base)
        self._add_unwritten(
            {prefix + key.removeprefix(OWN_PREFIX): value for key, value in metrics.items()}
        )
        log.info("evaluation of %s: %s", round_.model, json.dumps(metrics))

    def _add_unwritten(self, metrics: dict[str, float]) -> None:
        if not self._unwritten_metrics or not metrics.keys().isdisjoint(
            self._unwritten_metrics[-1]
        ):
            self._unwritten_metrics.append({})
        self._unwritten_metrics[-1] |= metrics

    def _get_prefix(self, environment: str, *, is_base: bool) -> str:
        prefix = (OWN_PREFIX, BASE_PREFIX)[is_base]
        if environment == self.environments[0]:
            return prefix
        return f"environments/{environment}/{prefix}"

    def _give_up_dead_parts(self, reason: str | None = None) -> None:
        """Give up silent environments, and all of them at the deadline or for a reason."""
        round_, now = self._round, time.monotonic()
        if round_ is None:
            return
        if reason is None and now - round_.started_at > DEADLINE_S:
            reason = f"it had not ended after {DEADLINE_S:g} s"
        for environment in list(round_.parts):
            silent_s = now - self._heard_at.get(environment, now)
            if reason or silent_s > HEARTBEAT_TIMEOUT_S:
                silence = f"its process has sent no heartbeat for {silent_s:.0f} s"
                self._give_up(environment, reason or silence)

    def _give_up(self, environment: str, reason: str) -> None:
        """Record why an environment's part has failed, and end it."""
        assert self._round is not None
        step, model = self._round.step, self._round.model
        self._end_part(environment)
        self._add_unwritten({})
        failures = self._unwritten_metrics[-1]
        failures[FAILED_KEY] = failures.get(FAILED_KEY, 0) + 1
        log.warning("the evaluation of %s failed: %s; training continues", model, reason)
        if self.failures_file is None:
            return
        try:
            record_failed_evaluation(self.failures_file, step, environment, reason)
        except Exception as error:  # The reason is in the log.
            log.warning("the reason could not be stored: %s", error)

    def _end_part(self, environment: str) -> None:
        """End the part of an environment, and the round if no other part is open."""
        assert self._round is not None
        del self._round.parts[environment]
        if not self._round.parts:
            self._round = None
            self._wake_waiters()

    def _keep_weights_alive(self, round_: EvaluationRound) -> None:
        """Sample a token from the weights of a round now and then, so that no server drops them."""
        self._heard_at = dict.fromkeys(self.environments, time.monotonic()) | self._heard_at
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
