"""Record what an environment's own `evaluate()` samples and returns, by hooks in Atropos."""

from __future__ import annotations

import contextvars
import copy
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv
    from atroposlib.envs.server_handling.server_baseline import APIServer
    from atroposlib.envs.server_handling.server_manager import ServerManager

SAMPLING_METHODS = ("chat_completion", "completion", "tokens_and_logprobs_completion")


@dataclass
class EvaluationRun:
    """Track one call of `evaluate()`; `path` selects the weights, by default the current."""

    server_url: str
    path: str = ""
    prompts: set[tuple[Any, ...]] = field(default_factory=set)
    text_prompts: set[str] = field(default_factory=set)
    """Prompts that are raw text."""
    answered_texts: set[str] = field(default_factory=set)
    """Each of these prompts followed by an answer to it."""
    metrics: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """Where the samples are kept that the environment logs."""
    pinned_servers: dict[int, list[Any]] = field(default_factory=dict)

    def get_pinned_servers(self, servers: list[Any]) -> list[Any]:
        """Return the clients to use instead of a manager's own."""
        if id(servers) not in self.pinned_servers:
            self.pinned_servers[id(servers)] = [self._pin_to_weights(server) for server in servers]
        return self.pinned_servers[id(servers)]

    def _pin_to_weights(self, server: APIServer) -> Any:
        """Return a client of the same kind, with limits of its own, for this evaluation."""
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

    def is_run_server(self, server: APIServer) -> bool:
        """Return whether a client calls the run's own model; a judge, for example, does not."""
        return str(getattr(server.config, "base_url", None)).startswith(f"{self.server_url}/")

    def record_prompt(self, options: Mapping[str, Any]) -> None:
        """Record a prompt for the run's own model."""
        prompt = _get_prompt(options)
        if isinstance(prompt, str):
            self.text_prompts.add(prompt)
        else:
            self.prompts.add(prompt)

    def record_answer(self, options: Mapping[str, Any], response: object) -> None:
        """Record an answer of the run's model, by which a later raw turn is recognised."""
        prompt = _get_prompt(options)
        if isinstance(prompt, str):
            answers = [getattr(choice, "text", None) for choice in getattr(response, "choices", ())]
            self.answered_texts |= {prompt + text for text in answers if text}

    @property
    def num_items(self) -> int:
        """Return the number of held-out items that were sampled."""
        return count_items(self.prompts) + count_text_items(self.text_prompts, self.answered_texts)


current_evaluation: contextvars.ContextVar[EvaluationRun | None] = contextvars.ContextVar(
    "evaluation", default=None
)


def count_items(prompts: Iterable[tuple[Any, ...]]) -> int:
    """Count the prompts that do not continue another prompt, because later turns are not new
    items."""
    count, root = 0, None
    for prompt in sorted(prompts, key=lambda prompt: tuple(map(repr, prompt))):
        if root is None or prompt[: len(root)] != root:
            count, root = count + 1, prompt
    return count


def count_text_items(texts: Iterable[str], answered_texts: Iterable[str]) -> int:
    """Count the texts that do not continue an answered text.

    That a text begins with another text means nothing: "1 + 12" is not a later turn of "1 + 1".
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


def install_evaluation_hooks() -> None:
    """Patch Atropos to record the requests, items and metrics of `evaluate()`."""
    _install_server_choice()
    _install_request_recorder()
    _install_result_recorder()


def _install_server_choice() -> None:
    """Let a server manager use the current evaluation's clients, whoever calls it."""
    from atroposlib.envs.server_handling.server_manager import ServerManager

    def servers(self: ServerManager) -> list[Any]:
        own_servers: list[Any] = self.__dict__["servers"]
        evaluation_run = current_evaluation.get()
        if evaluation_run is not None:
            return evaluation_run.get_pinned_servers(own_servers)
        return own_servers

    def set_servers(self: ServerManager, value: list[Any]) -> None:
        self.__dict__["servers"] = value

    ServerManager.servers = property(servers, set_servers)


def _install_request_recorder() -> None:
    """Let each sampling request of an evaluation be recorded with its answers."""
    from atroposlib.envs.server_handling.server_baseline import APIServer

    for name in SAMPLING_METHODS:
        original = getattr(APIServer, name)

        @functools.wraps(original)
        async def call(self: APIServer, _original: Any = original, **options: Any) -> Any:
            evaluation_run = current_evaluation.get()
            if evaluation_run is None or not evaluation_run.is_run_server(self):
                return await _original(self, **options)
            evaluation_run.record_prompt(options)
            response = await _original(self, **options)
            evaluation_run.record_answer(options, response)
            return response

        setattr(APIServer, name, call)


def _install_result_recorder() -> None:
    """Record what `evaluate_log` is given; Atropos writes files only if a folder is set."""
    from atroposlib.envs.base import BaseEnv

    original = BaseEnv.evaluate_log

    @functools.wraps(original)
    async def evaluate_log(
        self: BaseEnv, metrics: dict[str, Any], *values: object, **options: object
    ) -> None:
        """Record the metrics and samples that an evaluation logs."""
        if (evaluation_run := current_evaluation.get()) is not None:
            evaluation_run.metrics |= metrics
            _write_samples(evaluation_run.folder, options.get("samples"))
            metrics = {**metrics, "eval/items": metrics.get("eval/items", evaluation_run.num_items)}
        # Atropos would log a warning without a folder.
        if self.config.data_dir_to_save_evals is not None:
            await original(self, metrics, *values, **options)

    BaseEnv.evaluate_log = evaluate_log


def _write_samples(folder: Path | None, samples: object) -> None:
    """Write the samples of an evaluation as a file of JSON lines."""
    if folder is not None and isinstance(samples, list):
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(sample, default=str) + "\n" for sample in samples]
        (folder / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
