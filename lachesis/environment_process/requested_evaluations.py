"""Evaluate held-out items when the trainer asks for it.

The trainer decides when an evaluation is due and keeps the weights of that step
(`lachesis.trainer.evaluation_schedule`). Requests of `evaluate()` to the run's inference server go
to the path of these weights, through separate clients, so that they never delay requests of
training. Training continues meanwhile. An environment reports a result by `evaluate_log(metrics)`,
by returning its metrics, or by adding pairs to `self.eval_metrics`, as the environments of Atropos
do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from lachesis.base.http_client import open_async_service_client
from lachesis.base.secrets import redact
from lachesis.environment_process import request_counters
from lachesis.environment_process.evaluation_recorder import EvaluationRun, current_evaluation

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

log = logging.getLogger(__name__)
HEARTBEAT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 1.0
# After the last step, a trainer that has not responded for this long is considered gone.
#
# This is longer than two requests, so that one lost response does not end the evaluations.
MAX_TRAINER_SILENCE_S = 180.0
# After the environment's last group, wait this long for a further training step.
MAX_STEP_WAIT_S = 1800.0
MAX_REASON_CHARS = 500


@dataclass(frozen=True)
class EvaluationClient:
    """Call the trainer's inference server for one environment of the run."""

    url: str
    token: str
    environment: str = ""
    """The environment's name, if several feed the run."""
    folder: Path | None = None
    """Where the answers to held-out items are kept: those of step 0, of the newest evaluated step,
    and of the base model if it is evaluated apart."""
    count_blocking: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Entered for each evaluation, to count for how long it keeps training from going on."""

    def install_schedule(self, cls: type[BaseEnv]) -> None:
        """Let the environment class evaluate when the trainer asks for it, and at no other time."""
        step_checks, manage = cls.env_step_checks, cls.env_manager
        evaluation_tasks: list[asyncio.Task[None]] = []

        @functools.wraps(step_checks)
        async def env_step_checks(env: BaseEnv) -> None:
            env.config.steps_per_eval = 0  # Otherwise Atropos would evaluate by itself.
            if not evaluation_tasks:
                evaluation_tasks.append(asyncio.create_task(self.run_evaluations(env)))
            await step_checks(env)

        @functools.wraps(manage)
        async def env_manager(env: BaseEnv) -> None:
            try:
                await manage(env)
                await _wait_for_last_evaluations(env, evaluation_tasks)
            finally:
                for task in evaluation_tasks:
                    task.cancel()

        cls.env_step_checks, cls.env_manager = env_step_checks, env_manager

    async def run_evaluations(self, env: BaseEnv) -> None:
        """Run the evaluations that the trainer asks for until it needs no more.

        A failed request or evaluation does not affect later ones. Only after the last step may a
        trainer that does not respond be considered gone; before that its end ends the attempt.
        """
        last_answer_at = time.monotonic()
        headers = {"Authorization": f"Bearer {self.token}"}
        async with open_async_service_client(
            base_url=self.url, headers=headers, timeout=REQUEST_TIMEOUT_S
        ) as http:
            while (
                _has_remaining_steps(env)
                or time.monotonic() - last_answer_at < MAX_TRAINER_SILENCE_S
            ):
                try:
                    response = await http.get(
                        "/evaluations/next", params={"environment": self.environment}
                    )
                    request = response.raise_for_status().json()
                    if request.get("over"):
                        return
                    if request:
                        await self._run_evaluation(http, env, request)
                    last_answer_at = time.monotonic()
                except Exception as error:
                    log.info("asking the trainer for an evaluation failed: %r", error)
                    await asyncio.sleep(POLL_INTERVAL_S)

    async def _run_evaluation(
        self, http: httpx.AsyncClient, env: BaseEnv, request: Mapping[str, Any]
    ) -> None:
        """Run one evaluation and report its result or its error.

        It ends early when the trainer has given it up.
        """
        path, started = f"/evaluations/{request['id']}", time.monotonic()
        model = "base" if request.get("is_base") else f"step-{request['step']}"
        folder = self.folder / model if self.folder else None
        evaluation_run = EvaluationRun(self.url, path, folder=folder)
        evaluation = asyncio.create_task(evaluate_and_report(env, evaluation_run))
        heartbeats = asyncio.create_task(_send_heartbeats(http, path))
        try:
            with self.count_blocking():
                await asyncio.wait({evaluation, heartbeats}, return_when=asyncio.FIRST_COMPLETED)
            if not evaluation.done():
                log.warning("the trainer has given up the evaluation of step %s", request["step"])
                return
            report = {**evaluation.result(), "seconds": time.monotonic() - started}
            await _deliver_report(http, path, report)
        finally:
            evaluation.cancel()
            heartbeats.cancel()
        if folder is not None and folder.is_dir():
            _remove_older_answers(folder)


def _has_remaining_steps(env: BaseEnv) -> bool:
    """Return whether training has not fetched the batch of its last step yet."""
    return bool(env.status_dict["current_step"] < env.config.total_steps)


async def _wait_for_last_evaluations(
    env: BaseEnv, evaluation_tasks: Sequence[asyncio.Task[None]]
) -> None:
    """Wait for the evaluations of the last steps.

    An environment makes its last group some steps before the end of training, because the batches
    of these steps are waiting already. It stops waiting when no step is made for `MAX_STEP_WAIT_S`
    seconds.
    """
    step, last_step_at = env.status_dict["current_step"], time.monotonic()
    while pending := [task for task in evaluation_tasks if not task.done()]:
        await asyncio.wait(pending, timeout=POLL_INTERVAL_S)
        with contextlib.suppress(Exception):  # If the API is gone, the step does not change.
            await env.get_status()
        if env.status_dict["current_step"] != step:
            step, last_step_at = env.status_dict["current_step"], time.monotonic()
        if _has_remaining_steps(env) and time.monotonic() - last_step_at > MAX_STEP_WAIT_S:
            log.warning(
                "no evaluation of the last steps: no step was made for %g s", MAX_STEP_WAIT_S
            )
            return


async def evaluate_and_report(env: BaseEnv, evaluation_run: EvaluationRun) -> dict[str, Any]:
    """Call `evaluate()` once and return the report: `metrics` and `items`, or `error`."""
    task = asyncio.create_task(_call_evaluate(env, evaluation_run))
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    if task.cancelled():
        return {"error": "evaluate() was cancelled"}
    error = task.exception()
    if error is not None:
        log.warning("evaluate() raised", exc_info=error)
        return {
            "error": redact(f"evaluate() raised {type(error).__name__}: {error}")[:MAX_REASON_CHARS]
        }
    if not evaluation_run.metrics:
        return {
            "error": "evaluate() returned no metrics; it must return them or call "
            "evaluate_log(metrics)",
            # It would return none at the next steps either.
            "is_last": True,
        }
    return {
        "metrics": {str(key): value for key, value in evaluation_run.metrics.items()},
        "items": evaluation_run.num_items,
    }


async def _call_evaluate(env: BaseEnv, evaluation_run: EvaluationRun) -> None:
    """Call `evaluate()` and collect the metrics that it returns, logs or appends."""
    current_evaluation.set(evaluation_run)  # It applies to this task and the tasks it starts.
    request_counters.is_evaluation_request.set(True)
    metrics_before = _get_eval_metrics(env)
    num_before = len(metrics_before)
    returned_metrics = await env.evaluate()
    if not evaluation_run.metrics and isinstance(returned_metrics, Mapping):
        evaluation_run.metrics = dict(returned_metrics)
    if not evaluation_run.metrics:
        metrics_after = _get_eval_metrics(env)
        # Logging a training step may have emptied the list meanwhile.
        if len(metrics_before) >= num_before:
            added_metrics = metrics_before[num_before:]
        else:
            added_metrics = metrics_before
        evaluation_run.metrics = _collect_metric_pairs(
            [*added_metrics, *(metrics_after if metrics_after is not metrics_before else [])]
        )


def _get_eval_metrics(env: BaseEnv) -> list[Any]:
    """Return the list in which the environment collects metrics for its next log.

    Logging a step replaces the list, also during an evaluation.
    """
    eval_metrics = getattr(env, "eval_metrics", None)
    if isinstance(eval_metrics, list):
        return eval_metrics
    return []


def _collect_metric_pairs(entries: Iterable[Any]) -> dict[str, Any]:
    """Return metrics that were added as pairs of name and value, as in Atropos' examples."""
    pairs = [entry for entry in entries if isinstance(entry, tuple | list) and len(entry) == 2]
    return {name: value for name, value in pairs if isinstance(name, str)}


def _encode_report(report: Mapping[str, Any]) -> str:
    """Return the report as JSON; metrics that do not fit become the evaluation's error."""
    try:
        return json.dumps(report, default=_to_float)
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"the metrics of evaluate() are not JSON: {type(error).__name__}: {error}"
        return json.dumps({"error": redact(reason)[:MAX_REASON_CHARS]})


def _to_float(value: Any) -> float | None:
    """Return a number of another library as a float, or None for any other value."""
    try:
        return float(value)
    except Exception:  # Values of other libraries may raise anything.
        return None


async def _send_heartbeats(http: httpx.AsyncClient, path: str) -> None:
    """Send the trainer heartbeats until it answers that the evaluation has ended."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        with contextlib.suppress(httpx.HTTPError):
            response = await http.post(f"{path}/alive")
            if response.status_code == httpx.codes.GONE:
                return


async def _deliver_report(http: httpx.AsyncClient, path: str, report: Mapping[str, Any]) -> None:
    """Send the report of an evaluation, and again twice if it does not arrive."""
    content, headers = _encode_report(report), {"Content-Type": "application/json"}
    for _ in range(3):
        try:
            response = await http.post(path, content=content, headers=headers)
            if response.status_code == httpx.codes.OK:
                return
            log.warning("the result of an evaluation was refused: %s", response.text[:300])
        except httpx.HTTPError as error:
            log.warning("the result of an evaluation was not delivered: %r", error)
        await asyncio.sleep(POLL_INTERVAL_S)


def _remove_older_answers(newest: Path) -> None:
    """Remove the answers of other steps than this newest one and step 0; those of the base stay."""
    if newest.name == "base":
        return
    for folder in newest.parent.glob("step-*"):
        if folder.name not in ("step-0", newest.name):
            shutil.rmtree(folder, ignore_errors=True)
