"""In the child that runs an environment: evaluate held-out items when the trainer asks for it.

The trainer says when an evaluation is due and keeps the weights of that step
(`lachesis.trainer.evaluations`). Whatever `evaluate()` asks of the run's inference server while it
runs goes to the path of these weights, through clients of its own, so that training's requests
never wait for a place. Training's workers go on meanwhile.

An environment reports a result by `evaluate_log(metrics)`, by returning its metrics, or by adding
pairs to `self.eval_metrics`, as the environments of Atropos do.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from lachesis.base.secrets import redact
from lachesis.env_process import counters

log = logging.getLogger(__name__)
MAX_EVALUATION_S = 3600.0
"""An evaluation that takes longer is ended."""
HEARTBEAT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 1.0
MAX_TRAINER_SILENCE_S = 180.0
"""After the last step, a trainer that has not answered for so long is gone. It is longer than two
questions, so that one that stays without an answer does not end the evaluations."""
MAX_STEP_WAIT_S = 1800.0
"""After the environment's last group, training that makes no step for so long is not waited for."""
MAX_REASON_CHARS = 500
SAMPLING_METHODS = ("chat_completion", "completion", "tokens_and_logprobs_completion")


@dataclass
class EvaluationRun:
    """One call of `evaluate()`. `path` is that of its weights; without one they are the server's
    own.
    """

    server_url: str
    path: str = ""
    prompts: set[tuple[Any, ...]] = field(default_factory=set)
    text_prompts: set[str] = field(default_factory=set)
    """The prompts that are raw text."""
    answered_texts: set[str] = field(default_factory=set)
    """Each of these texts followed by an answer to it."""
    metrics: dict[str, Any] = field(default_factory=dict)
    pinned_servers: dict[int, list[Any]] = field(default_factory=dict)

    def get_pinned_servers(self, servers: list[Any]) -> list[Any]:
        """Return the clients to use instead of a manager's own ones."""
        if id(servers) not in self.pinned_servers:
            self.pinned_servers[id(servers)] = [self._pin_to_weights(server) for server in servers]
        return self.pinned_servers[id(servers)]

    def _pin_to_weights(self, server: Any) -> Any:
        """Return a client of the same kind, with its own limits, for the weights under evaluation."""
        base_url = str(getattr(server.config, "base_url", None))
        if not self.path or not base_url.startswith(f"{self.server_url}/"):
            return server
        max_requests = server.config.num_requests_for_eval
        url = f"{self.server_url}{self.path}{base_url.removeprefix(self.server_url)}"
        client = copy.copy(server)
        client.config = server.config.model_copy(update={"base_url": url, "health_check": False})
        if hasattr(server, "openai"):
            client.openai = server.openai.with_options(base_url=url)
        client.sem, client.eval_sem = (
            type(server.sem)(max_requests),
            type(server.eval_sem)(max_requests),
        )
        client.server_healthy, client.initialized, client.check_task = True, False, None
        for name in (
            "attempts_list",
            "request_timings",
            "eval_attempts_list",
            "eval_request_timings",
        ):
            setattr(client, name, [])
        return client

    def is_run_server(self, server: Any) -> bool:
        """Return whether a client asks the run's own model. A judge answers no held-out item."""
        return str(getattr(server.config, "base_url", None)).startswith(f"{self.server_url}/")

    def record_prompt(self, options: Mapping[str, Any]) -> None:
        """Note what the run's own model was asked."""
        prompt = _get_prompt(options)
        if isinstance(prompt, str):
            self.text_prompts.add(prompt)
        else:
            self.prompts.add(prompt)

    def record_answer(self, options: Mapping[str, Any], response: Any) -> None:
        """Note what the run's own model answered, by which a later turn in raw text is known."""
        prompt = _get_prompt(options)
        if isinstance(prompt, str):
            answers = [getattr(choice, "text", None) for choice in getattr(response, "choices", ())]
            self.answered_texts |= {prompt + text for text in answers if text}

    @property
    def num_items(self) -> int:
        """The number of held-out items that were asked."""
        return count_items(self.prompts) + count_text_items(self.text_prompts, self.answered_texts)


current_evaluation: contextvars.ContextVar[EvaluationRun | None] = contextvars.ContextVar(
    "evaluation", default=None
)


def count_items(prompts: Iterable[tuple[Any, ...]]) -> int:
    """Count the prompts that do not continue another one: the later turns of a conversation are no
    new items.
    """
    count, root = 0, None
    for prompt in sorted(prompts, key=lambda prompt: tuple(map(repr, prompt))):
        if root is None or prompt[: len(root)] != root:
            count, root = count + 1, prompt
    return count


def count_text_items(texts: Iterable[str], answered_texts: Iterable[str]) -> int:
    """Count the texts that do not continue an answered one.

    That a text begins with another text alone says nothing: "1 + 12" is no later turn of "1 + 1".
    """
    count, answered_text = 0, None
    labelled_texts = [(text, False) for text in answered_texts] + [(text, True) for text in texts]
    for text, is_prompt in sorted(labelled_texts):
        continues_answer = answered_text is not None and text.startswith(answered_text)
        if not is_prompt and not continues_answer:
            answered_text = text
        count += is_prompt and (not continues_answer or text == answered_text)
    return count


def _get_prompt(options: Mapping[str, Any]) -> tuple[Any, ...] | str:
    """Return token ids or messages, or else the raw text."""
    ids, messages = options.get("input_ids"), options.get("messages")
    if ids is not None:
        return tuple(ids)
    if messages is not None:
        return tuple(json.dumps(message, sort_keys=True, default=str) for message in messages)
    return str(options.get("prompt"))


def install_evaluation_hooks(server_url: str) -> None:
    """Change Atropos so that a call of `evaluate()` is seen: its requests, its items, and its
    metrics.

    Args:
        server_url: The address of the run's inference server.
    """
    _install_server_choice()
    _install_request_recorder()
    _install_result_recorder()
    _install_command_recorder(server_url)


def _install_server_choice() -> None:
    """Let a server manager give the clients of the evaluation under way, wherever it is asked from."""
    from atroposlib.envs.server_handling.server_manager import ServerManager

    def servers(self: Any) -> list[Any]:
        own_servers: list[Any] = self.__dict__["servers"]
        evaluation_run = current_evaluation.get()
        return (
            evaluation_run.get_pinned_servers(own_servers)
            if evaluation_run is not None
            else own_servers
        )

    def set_servers(self: Any, value: list[Any]) -> None:
        self.__dict__["servers"] = value

    ServerManager.servers = property(servers, set_servers)


def _install_request_recorder() -> None:
    from atroposlib.envs.server_handling.server_baseline import APIServer

    for name in SAMPLING_METHODS:
        original = getattr(APIServer, name)

        @functools.wraps(original)
        async def call(self: Any, _original: Any = original, **options: Any) -> Any:
            evaluation_run = current_evaluation.get()
            if evaluation_run is None or not evaluation_run.is_run_server(self):
                return await _original(self, **options)
            evaluation_run.record_prompt(options)
            response = await _original(self, **options)
            evaluation_run.record_answer(options, response)
            return response

        setattr(APIServer, name, call)


def _install_result_recorder() -> None:
    """Keep what `evaluate_log` is given, with the number of items, and write a file only where
    there is a place.
    """
    from atroposlib.envs.base import BaseEnv

    original = BaseEnv.evaluate_log

    @functools.wraps(original)
    async def evaluate_log(
        self: Any, metrics: dict[str, Any], *values: Any, **options: Any
    ) -> None:
        if (evaluation_run := current_evaluation.get()) is not None:
            evaluation_run.metrics |= metrics
            metrics = {**metrics, "eval/items": metrics.get("eval/items", evaluation_run.num_items)}
        if self.config.data_dir_to_save_evals is not None:
            await original(self, metrics, *values, **options)

    BaseEnv.evaluate_log = evaluate_log


def _install_command_recorder(server_url: str) -> None:
    """See the evaluation of the `evaluate` command too, which asks the weights that its
    configuration names.
    """
    from atroposlib.envs.base import BaseEnv

    original = BaseEnv._run_evaluate

    @functools.wraps(original)
    async def _run_evaluate(self: Any) -> None:
        current_evaluation.set(EvaluationRun(server_url))
        await original(self)

    BaseEnv._run_evaluate = _run_evaluate


@dataclass(frozen=True)
class EvaluationClient:
    """The trainer's inference server, as one environment of the run asks it."""

    url: str
    token: str
    environment: str = ""
    """Its name, where several environments feed the run."""

    def install_schedule(self, cls: Any) -> None:
        """Let the environment class evaluate when the trainer asks for it, and at no other time."""
        step_checks, manage = cls.env_step_checks, cls.env_manager
        evaluation_tasks: list[asyncio.Task[None]] = []

        @functools.wraps(step_checks)
        async def env_step_checks(env: Any) -> None:
            if env.config.steps_per_eval > 0:
                env.config.steps_per_eval = 0  # Atropos would evaluate by itself
                evaluation_tasks.append(asyncio.create_task(self.run_evaluations(env)))
            await step_checks(env)

        @functools.wraps(manage)
        async def env_manager(env: Any) -> None:
            try:
                await manage(env)
                await _wait_for_last_evaluations(env, evaluation_tasks)
            finally:
                for task in evaluation_tasks:
                    task.cancel()

        cls.env_step_checks, cls.env_manager = env_step_checks, env_manager

    async def run_evaluations(self, env: Any) -> None:
        """Make the evaluations that the trainer asks for, until there will be no more.

        Whatever goes wrong with one question or evaluation ends no later one. A trainer that does
        not answer is given up after the last step only; before that its end ends the attempt.
        """
        last_answer_at = time.monotonic()
        headers = {"Authorization": f"Bearer {self.token}"}
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False
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
                        await self._run_evaluation(http, env, str(request["id"]))
                    last_answer_at = time.monotonic()
                except Exception as error:
                    log.info("asking the trainer for an evaluation failed: %r", error)
                    await asyncio.sleep(POLL_INTERVAL_S)

    async def _run_evaluation(self, http: httpx.AsyncClient, env: Any, evaluation_id: str) -> None:
        """Make one evaluation and report what came of it. Whatever goes wrong is the report."""
        path, started = f"/evaluations/{evaluation_id}", time.monotonic()
        async with _keep_alive(http, path):
            report = await evaluate_and_report(env, EvaluationRun(self.url, path))
        report["seconds"] = time.monotonic() - started
        content, headers = _encode_report(report), {"Content-Type": "application/json"}
        for _ in range(3):
            try:
                response = await http.post(path, content=content, headers=headers)
                if response.status_code == 200:
                    return
                log.warning("the result of an evaluation was refused: %s", response.text[:300])
            except httpx.HTTPError as error:
                log.warning("the result of an evaluation was not delivered: %r", error)
            await asyncio.sleep(POLL_INTERVAL_S)


def _has_remaining_steps(env: Any) -> bool:
    """Return whether training has not fetched the batch of its last step yet."""
    return bool(env.status_dict["current_step"] < env.config.total_steps)


async def _wait_for_last_evaluations(
    env: Any, evaluation_tasks: Sequence[asyncio.Task[None]]
) -> None:
    """Wait for the evaluations of the last steps.

    An environment makes its last group some steps before the end of training, because the batches
    of these steps wait already. It gives training up that makes no step for `IDLE_S` seconds.
    """
    step, last_step_at = env.status_dict["current_step"], time.monotonic()
    while pending := [task for task in evaluation_tasks if not task.done()]:
        await asyncio.wait(pending, timeout=POLL_INTERVAL_S)
        with contextlib.suppress(Exception):  # an API that is gone makes no step either
            await env.get_status()
        if env.status_dict["current_step"] != step:
            step, last_step_at = env.status_dict["current_step"], time.monotonic()
        if _has_remaining_steps(env) and time.monotonic() - last_step_at > MAX_STEP_WAIT_S:
            log.warning(
                "no evaluation of the last steps: no step was made for %g s", MAX_STEP_WAIT_S
            )
            return


async def evaluate_and_report(env: Any, evaluation_run: EvaluationRun) -> dict[str, Any]:
    """Call `evaluate()` once and return what to report: `metrics` and `items`, or `error`."""
    task = asyncio.create_task(_call_evaluate(env, evaluation_run))
    done, _ = await asyncio.wait({task}, timeout=MAX_EVALUATION_S)
    if not done:
        task.cancel()
        return {"error": f"evaluate() was not done after {MAX_EVALUATION_S:g} s"}
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
            "error": "evaluate() gave no metrics; it must call evaluate_log(metrics) or return them"
        }
    return {
        "metrics": {str(key): value for key, value in evaluation_run.metrics.items()},
        "items": evaluation_run.num_items,
    }


async def _call_evaluate(env: Any, evaluation_run: EvaluationRun) -> None:
    current_evaluation.set(evaluation_run)  # of this task and those that it starts
    counters.is_evaluation_request.set(True)
    metrics_before = _get_eval_metrics(env)
    num_before = len(metrics_before)
    returned_metrics = await env.evaluate()
    if not evaluation_run.metrics and isinstance(returned_metrics, Mapping):
        evaluation_run.metrics = dict(returned_metrics)
    if not evaluation_run.metrics:
        metrics_after = _get_eval_metrics(env)
        # a log of a step has emptied it
        added_metrics = (
            metrics_before[num_before:] if len(metrics_before) >= num_before else metrics_before
        )
        evaluation_run.metrics = _collect_metric_pairs(
            [*added_metrics, *(metrics_after if metrics_after is not metrics_before else [])]
        )


def _get_eval_metrics(env: Any) -> list[Any]:
    """Return the list in which the environment keeps metrics for its next log.

    The log of a step puts a new list in its place, also while an evaluation is under way.
    """
    eval_metrics = getattr(env, "eval_metrics", None)
    return eval_metrics if isinstance(eval_metrics, list) else []


def _collect_metric_pairs(entries: Iterable[Any]) -> dict[str, Any]:
    """Return what was kept in the way of Atropos' examples, as pairs of a name and a value."""
    pairs = [entry for entry in entries if isinstance(entry, tuple | list) and len(entry) == 2]
    return {name: value for name, value in pairs if isinstance(name, str)}


def _encode_report(report: Mapping[str, Any]) -> str:
    """Return the report as JSON. Metrics that cannot be written are the error of the evaluation."""
    try:
        return json.dumps(report, default=_to_float)
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"the metrics of evaluate() are no JSON: {type(error).__name__}: {error}"
        return json.dumps({"error": redact(reason)[:MAX_REASON_CHARS]})


def _to_float(value: Any) -> float | None:
    """Return numbers of other libraries as a plain one; what is none is left out by the trainer."""
    try:
        return float(value)
    except Exception:  # a value of another library raises whatever its author chose
        return None


@contextlib.asynccontextmanager
async def _keep_alive(http: httpx.AsyncClient, path: str) -> AsyncIterator[None]:
    """Give the trainer a sign of life now and then inside the block."""

    async def send_heartbeats() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with contextlib.suppress(httpx.HTTPError):
                await http.post(f"{path}/alive")

    task = asyncio.create_task(send_heartbeats())
    try:
        yield
    finally:
        task.cancel()
