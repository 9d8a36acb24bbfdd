"""In the child that runs an environment: evaluate held-out items when the trainer asks for it.

The trainer says when an evaluation is due and keeps the weights of that step (`lachesis.trainer.evaluations`).
Whatever `evaluate()` asks of the run's inference server while it runs goes to the path of these weights, through
clients of its own, so that training's requests never wait for a place. Training's workers go on meanwhile.

An environment reports a result by `evaluate_log(metrics)`, by returning its metrics, or by adding pairs to
`self.eval_metrics`, as the environments of Atropos do.
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
EVALUATION_S = 3600.0
"""An evaluation that takes longer is ended."""
ALIVE_S = 10.0
ASK_S = 60.0
PAUSE_S = 1.0
LOST_S = 180.0
"""After the last step, a trainer that has not answered for so long is gone. It is longer than two
questions, so that one that stays without an answer does not end the evaluations."""
IDLE_S = 1800.0
"""After the environment's last group, training that makes no step for so long is not waited for."""
MAX_REASON = 500
SAMPLING = ("chat_completion", "completion", "tokens_and_logprobs_completion")


@dataclass
class EvaluationRun:
    """One call of `evaluate()`. `path` is that of its weights; without one they are the server's own."""

    server_url: str
    path: str = ""
    prompts: set[tuple[Any, ...]] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    """The prompts that are raw text."""
    answered: set[str] = field(default_factory=set)
    """Each of these texts followed by an answer to it."""
    metrics: dict[str, Any] = field(default_factory=dict)
    servers: dict[int, list[Any]] = field(default_factory=dict)

    def servers_of(self, servers: list[Any]) -> list[Any]:
        """Return the clients to use instead of a manager's own ones."""
        if id(servers) not in self.servers:
            self.servers[id(servers)] = [self._pinned(server) for server in servers]
        return self.servers[id(servers)]

    def _pinned(self, server: Any) -> Any:
        """Return a client of the same kind, with its own limits, for the weights under evaluation."""
        base_url = str(getattr(server.config, "base_url", None))
        if not self.path or not base_url.startswith(f"{self.server_url}/"):
            return server
        limit = server.config.num_requests_for_eval
        url = f"{self.server_url}{self.path}{base_url.removeprefix(self.server_url)}"
        twin = copy.copy(server)
        twin.config = server.config.model_copy(update={"base_url": url, "health_check": False})
        if hasattr(server, "openai"):
            twin.openai = server.openai.with_options(base_url=url)
        twin.sem, twin.eval_sem = type(server.sem)(limit), type(server.eval_sem)(limit)
        twin.server_healthy, twin.initialized, twin.check_task = True, False, None
        for name in ("attempts_list", "request_timings", "eval_attempts_list", "eval_request_timings"):
            setattr(twin, name, [])
        return twin

    def is_of_run(self, server: Any) -> bool:
        """Return whether a client asks the run's own model. A judge answers no held-out item."""
        return str(getattr(server.config, "base_url", None)).startswith(f"{self.server_url}/")

    def note_prompt(self, options: Mapping[str, Any]) -> None:
        """Note what the run's own model was asked."""
        prompt = _prompt(options)
        if isinstance(prompt, str):
            self.texts.add(prompt)
        else:
            self.prompts.add(prompt)

    def note_answer(self, options: Mapping[str, Any], answer: Any) -> None:
        """Note what the run's own model answered, by which a later turn in raw text is known."""
        prompt = _prompt(options)
        if isinstance(prompt, str):
            answers = [getattr(choice, "text", None) for choice in getattr(answer, "choices", ())]
            self.answered |= {prompt + text for text in answers if text}

    @property
    def items(self) -> int:
        """The number of held-out items that were asked."""
        return count_items(self.prompts) + count_texts(self.texts, self.answered)


current: contextvars.ContextVar[EvaluationRun | None] = contextvars.ContextVar("evaluation", default=None)


def count_items(prompts: Iterable[tuple[Any, ...]]) -> int:
    """Count the prompts that do not continue another one: the later turns of a conversation are no new items."""
    count, root = 0, None
    for prompt in sorted(prompts, key=lambda prompt: tuple(map(repr, prompt))):
        if root is None or prompt[: len(root)] != root:
            count, root = count + 1, prompt
    return count


def count_texts(texts: Iterable[str], answered: Iterable[str]) -> int:
    """Count the texts that do not continue an answered one.

    That a text begins with another text alone says nothing: "1 + 12" is no later turn of "1 + 1".
    """
    count, turn = 0, None
    marked = [(text, False) for text in answered] + [(text, True) for text in texts]
    for text, is_prompt in sorted(marked):
        goes_on = turn is not None and text.startswith(turn)
        if not is_prompt and not goes_on:
            turn = text
        count += is_prompt and (not goes_on or text == turn)
    return count


def _prompt(options: Mapping[str, Any]) -> tuple[Any, ...] | str:
    """Return token ids or messages, or else the raw text."""
    ids, messages = options.get("input_ids"), options.get("messages")
    if ids is not None:
        return tuple(ids)
    if messages is not None:
        return tuple(json.dumps(message, sort_keys=True, default=str) for message in messages)
    return str(options.get("prompt"))


def install(server_url: str) -> None:
    """Change Atropos so that a call of `evaluate()` is seen: its requests, its items, and its metrics.

    Args:
        server_url: The address of the run's inference server.
    """
    _choose_servers()
    _watch_requests()
    _watch_results()
    _watch_command(server_url)


def _choose_servers() -> None:
    """Let a server manager give the clients of the evaluation under way, wherever it is asked from."""
    from atroposlib.envs.server_handling.server_manager import ServerManager

    def servers(self: Any) -> list[Any]:
        own: list[Any] = self.__dict__["servers"]
        run = current.get()
        return run.servers_of(own) if run is not None else own

    def set_servers(self: Any, value: list[Any]) -> None:
        self.__dict__["servers"] = value

    ServerManager.servers = property(servers, set_servers)


def _watch_requests() -> None:
    from atroposlib.envs.server_handling.server_baseline import APIServer

    for name in SAMPLING:
        original = getattr(APIServer, name)

        @functools.wraps(original)
        async def call(self: Any, _original: Any = original, **options: Any) -> Any:
            run = current.get()
            if run is None or not run.is_of_run(self):
                return await _original(self, **options)
            run.note_prompt(options)
            answer = await _original(self, **options)
            run.note_answer(options, answer)
            return answer

        setattr(APIServer, name, call)


def _watch_results() -> None:
    """Keep what `evaluate_log` is given, with the number of items, and write a file only where there is a place."""
    from atroposlib.envs.base import BaseEnv

    original = BaseEnv.evaluate_log

    @functools.wraps(original)
    async def evaluate_log(self: Any, metrics: dict[str, Any], *values: Any, **options: Any) -> None:
        if (run := current.get()) is not None:
            run.metrics |= metrics
            metrics = {**metrics, "eval/items": metrics.get("eval/items", run.items)}
        if self.config.data_dir_to_save_evals is not None:
            await original(self, metrics, *values, **options)

    BaseEnv.evaluate_log = evaluate_log


def _watch_command(server_url: str) -> None:
    """See the evaluation of the `evaluate` command too, which asks the weights that its configuration names."""
    from atroposlib.envs.base import BaseEnv

    original = BaseEnv._run_evaluate

    @functools.wraps(original)
    async def _run_evaluate(self: Any) -> None:
        current.set(EvaluationRun(server_url))
        await original(self)

    BaseEnv._run_evaluate = _run_evaluate


@dataclass(frozen=True)
class Trainer:
    """The trainer's inference server, as one environment of the run asks it."""

    url: str
    token: str
    environment: str = ""
    """Its name, where several environments feed the run."""

    def watch(self, cls: Any) -> None:
        """Let the environment class evaluate when the trainer asks for it, and at no other time."""
        step_checks, manage = cls.env_step_checks, cls.env_manager
        asking: list[asyncio.Task[None]] = []

        @functools.wraps(step_checks)
        async def env_step_checks(env: Any) -> None:
            if env.config.steps_per_eval > 0:
                env.config.steps_per_eval = 0  # Atropos would evaluate by itself
                asking.append(asyncio.create_task(self.serve(env)))
            await step_checks(env)

        @functools.wraps(manage)
        async def env_manager(env: Any) -> None:
            try:
                await manage(env)
                await _outlast_training(env, asking)
            finally:
                for task in asking:
                    task.cancel()

        cls.env_step_checks, cls.env_manager = env_step_checks, env_manager

    async def serve(self, env: Any) -> None:
        """Make the evaluations that the trainer asks for, until there will be no more.

        Whatever goes wrong with one question or evaluation ends no later one. A trainer that does
        not answer is given up after the last step only; before that its end ends the attempt.
        """
        answered = time.monotonic()
        headers = {"Authorization": f"Bearer {self.token}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=ASK_S, trust_env=False) as http:
            while _has_steps(env) or time.monotonic() - answered < LOST_S:
                try:
                    answer = await http.get("/evaluations/next", params={"environment": self.environment})
                    found = answer.raise_for_status().json()
                    if found.get("over"):
                        return
                    if found:
                        await self._evaluate(http, env, str(found["id"]))
                    answered = time.monotonic()
                except Exception as error:
                    log.info("asking the trainer for an evaluation failed: %r", error)
                    await asyncio.sleep(PAUSE_S)

    async def _evaluate(self, http: httpx.AsyncClient, env: Any, evaluation: str) -> None:
        """Make one evaluation and report what came of it. Whatever goes wrong is the report."""
        path, started = f"/evaluations/{evaluation}", time.monotonic()
        async with _kept_alive(http, path):
            report = await evaluate(env, EvaluationRun(self.url, path))
        report["seconds"] = time.monotonic() - started
        content, kind = _encode(report), {"Content-Type": "application/json"}
        for _ in range(3):
            try:
                answer = await http.post(path, content=content, headers=kind)
                if answer.status_code == 200:
                    return
                log.warning("the result of an evaluation was refused: %s", answer.text[:300])
            except httpx.HTTPError as error:
                log.warning("the result of an evaluation was not delivered: %r", error)
            await asyncio.sleep(PAUSE_S)


def _has_steps(env: Any) -> bool:
    """Return whether training has not fetched the batch of its last step yet."""
    return bool(env.status_dict["current_step"] < env.config.total_steps)


async def _outlast_training(env: Any, asking: Sequence[asyncio.Task[None]]) -> None:
    """Wait for the evaluations of the last steps.

    An environment makes its last group some steps before the end of training, because the batches
    of these steps wait already. It gives training up that makes no step for `IDLE_S` seconds.
    """
    step, moved = env.status_dict["current_step"], time.monotonic()
    while waiting := [task for task in asking if not task.done()]:
        await asyncio.wait(waiting, timeout=PAUSE_S)
        with contextlib.suppress(Exception):  # an API that is gone makes no step either
            await env.get_status()
        if env.status_dict["current_step"] != step:
            step, moved = env.status_dict["current_step"], time.monotonic()
        if _has_steps(env) and time.monotonic() - moved > IDLE_S:
            log.warning("no evaluation of the last steps: no step was made for %g s", IDLE_S)
            return


async def evaluate(env: Any, run: EvaluationRun) -> dict[str, Any]:
    """Call `evaluate()` once and return what to report: `metrics` and `items`, or `error`."""
    task = asyncio.create_task(_call(env, run))
    done, _ = await asyncio.wait({task}, timeout=EVALUATION_S)
    if not done:
        task.cancel()
        return {"error": f"evaluate() was not done after {EVALUATION_S:g} s"}
    if task.cancelled():
        return {"error": "evaluate() was cancelled"}
    error = task.exception()
    if error is not None:
        log.warning("evaluate() raised", exc_info=error)
        return {"error": redact(f"evaluate() raised {type(error).__name__}: {error}")[:MAX_REASON]}
    if not run.metrics:
        return {"error": "evaluate() gave no metrics; it must call evaluate_log(metrics) or return them"}
    return {"metrics": {str(key): value for key, value in run.metrics.items()}, "items": run.items}


async def _call(env: Any, run: EvaluationRun) -> None:
    current.set(run)  # of this task and those that it starts
    counters.uncounted.set(True)
    kept = _kept(env)
    before = len(kept)
    found = await env.evaluate()
    if not run.metrics and isinstance(found, Mapping):
        run.metrics = dict(found)
    if not run.metrics:
        now = _kept(env)
        added = kept[before:] if len(kept) >= before else kept  # a log of a step has emptied it
        run.metrics = _pairs([*added, *(now if now is not kept else [])])


def _kept(env: Any) -> list[Any]:
    """Return the list in which the environment keeps metrics for its next log.

    The log of a step puts a new list in its place, also while an evaluation is under way.
    """
    kept = getattr(env, "eval_metrics", None)
    return kept if isinstance(kept, list) else []


def _pairs(kept: Iterable[Any]) -> dict[str, Any]:
    """Return what was kept in the way of Atropos' examples, as pairs of a name and a value."""
    pairs = [entry for entry in kept if isinstance(entry, tuple | list) and len(entry) == 2]
    return {name: value for name, value in pairs if isinstance(name, str)}


def _encode(report: Mapping[str, Any]) -> str:
    """Return the report as JSON. Metrics that cannot be written are the error of the evaluation."""
    try:
        return json.dumps(report, default=_number)
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"the metrics of evaluate() are no JSON: {type(error).__name__}: {error}"
        return json.dumps({"error": redact(reason)[:MAX_REASON]})


def _number(value: Any) -> float | None:
    """Return numbers of other libraries as a plain one; what is none is left out by the trainer."""
    try:
        return float(value)
    except Exception:  # a value of another library raises whatever its author chose
        return None


@contextlib.asynccontextmanager
async def _kept_alive(http: httpx.AsyncClient, path: str) -> AsyncIterator[None]:
    """Give the trainer a sign of life now and then inside the block."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            with contextlib.suppress(httpx.HTTPError):
                await http.post(f"{path}/alive")

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
