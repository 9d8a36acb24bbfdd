"""Add to an environment's `process` command what an inference test needs.

    python -m lachesis.environment_process inference-test FILE SPEC process --config YAML

SPEC is a JSON file with `output`, `counters`, `samples`, `prompts`, `max_tokens` and `temperature`.
An exception of the environment costs one group and is counted; if no groups come at all, the
process ends instead of trying forever. With prompts, each is answered and scored by the
environment's own verifier. The item for a prompt comes from the environment's method
`item_from_prompt(prompt)` if it has one, else it is searched among the results of
`get_next_item()`.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.base.json_text import Json
from lachesis.environment_process import request_counters
from lachesis.environment_process.rollout_counters import RolloutCounters, install_rollout_counters
from lachesis.environment_toolkit.failure_reasons import is_endpoint_error, is_transport_error

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv, Item, ScoredDataGroup
    from atroposlib.envs.server_handling.server_baseline import APIServer

MAX_UNUSABLE_GROUPS = 8
# Number of groups whose responses are kept for people to read.
MAX_SAMPLED_GROUPS = 6
MAX_SEARCHED_ITEMS = 5000
MAX_SEARCH_S = 20.0
NO_ITEM_MESSAGE = (
    "no item with this prompt was found, so the verifier has nothing to compare the answer with; "
    "an environment can have a method item_from_prompt(prompt)"
)


def install_inference_test(spec: Json) -> RolloutCounters:
    """Patch Atropos' base class before the environment's file runs, and return the counters."""
    from atroposlib.envs.base import BaseEnv

    original_cli = BaseEnv.cli.__func__
    rollout_counters = RolloutCounters(Path(spec["counters"]))
    rollout_counters.per_group = []
    request_counters.install_request_counters(rollout_counters)
    sampling_overrides = {
        name: spec[name] for name in ("max_tokens", "temperature") if spec.get(name) is not None
    }
    sampled_answers = _install_sampling_recorder(sampling_overrides if spec.get("prompts") else {})

    def cli(cls: type[BaseEnv]) -> None:
        install_rollout_counters(rollout_counters, cls, max_unusable_groups=MAX_UNUSABLE_GROUPS)
        if spec.get("prompts"):
            cls.process_manager = _build_process_manager(spec, sampled_answers)
        else:
            _install_sample_writer(cls, Path(spec["samples"]), sampled_answers)
        original_cli(cls)

    BaseEnv.cli = classmethod(cli)
    _name_wandb_run(spec["wandb_run"])
    return rollout_counters


def record_failure_kind(rollout_counters: RolloutCounters, error: BaseException) -> None:
    """Record whether the environment, its endpoint or the network is to blame for an error."""
    is_endpoint_fault, is_transport_fault = is_endpoint_error(error), is_transport_error(error)
    rollout_counters.failure = {
        "kind": "transport"
        if is_transport_fault
        else "endpoint"
        if is_endpoint_fault
        else "environment"
    }
    rollout_counters.write()


def _name_wandb_run(name: str) -> None:
    """Give the W&B run of Atropos' `process` command this name."""
    import wandb

    original = wandb.init

    def init(*values: Any, **options: Any) -> Any:
        return original(*values, **{**options, "name": name})

    wandb.init = init


def _install_sample_writer(cls: type[BaseEnv], file: Path, sampled_answers: SampledAnswers) -> None:
    """Write the prompts, answers and scores of the first groups."""
    collect = cls.collect_trajectories
    num_written = 0

    async def collect_trajectories(self: BaseEnv, item: Item) -> Any:
        """Collect a group, and write its prompt and answers as a sample of the test."""
        nonlocal num_written
        sampled_answers.clear()
        group, backlog = await collect(self, item)
        if group and num_written < MAX_SAMPLED_GROUPS:
            num_written += 1
            # A group of an unusual shape is scored even if its texts cannot be written.
            with contextlib.suppress(Exception):
                _append_json_line(
                    file,
                    {
                        "prompt": sampled_answers.prompt or _decode_prompt(self, group),
                        **_collect_responses(self, group, sampled_answers.texts),
                    },
                )
        return group, backlog

    cls.collect_trajectories = collect_trajectories


def _build_process_manager(spec: Json, sampled_answers: SampledAnswers) -> Any:
    """Return a method that answers the user's prompts, in place of one that makes groups."""

    async def process_manager(self: BaseEnv) -> None:
        """Answer the user's own prompts, and score those whose item the data set has."""
        await self.setup()
        self.config.group_size = self.group_size_to_process
        items = await _find_items(self, spec["prompts"])
        for prompt in spec["prompts"]:
            item = items.get(prompt)
            sampled_answers.clear()
            result = await (
                _sample_unscored(self, prompt)
                if item is None
                else _score_item(self, item, sampled_answers.texts)
            )
            _append_json_line(Path(spec["output"]), {"prompt": prompt, **result})

    return process_manager


class SampledAnswers:
    """Hold the last prompt and the texts that were sampled since `clear` was called.

    An endpoint that returns only text yields placeholder tokens, so the group has no text.
    """

    def __init__(self) -> None:
        self.prompt: str | None = None
        self.texts: list[str] = []

    def clear(self) -> None:
        """Forget the prompt and the texts."""
        self.prompt = None
        self.texts.clear()


def _install_sampling_recorder(sampling_overrides: Json) -> SampledAnswers:
    """Sample with these settings, and record the texts."""
    from atroposlib.envs.server_handling.server_baseline import APIServer

    sampled_answers = SampledAnswers()
    for name in ("chat_completion", "completion", "tokens_and_logprobs_completion"):
        original = getattr(APIServer, name)

        async def call(self: APIServer, _original: Any = original, **options: Any) -> Any:
            """Sample, and keep the prompt and the texts of the answers."""
            messages = options.get("messages")
            if messages:
                prompt = messages[-1].get("content")
            else:
                prompt = options.get("prompt")
            sampled_answers.prompt = sampled_answers.prompt or (
                str(prompt)[:2000] if prompt is not None else None
            )
            response = await _original(self, **{**options, **sampling_overrides})
            for choice in getattr(response, "choices", ()):
                message = getattr(choice, "message", None)
                sampled_answers.texts.append((message.content if message else choice.text) or "")
            return response

        setattr(APIServer, name, call)
    return sampled_answers


def _decode_prompt(env: BaseEnv, group: ScoredDataGroup) -> str:
    """Return the text before the first sampled token, for requests with token ids."""
    first_group = group[0] if isinstance(group, list) else group
    tokens, masks = first_group["tokens"][0], first_group["masks"][0]
    first_sampled = next((index for index, mask in enumerate(masks) if mask != -100), len(tokens))
    return str(env.tokenizer.decode(tokens[:first_sampled]))[:2000]


def _append_json_line(file: Path, line: Json) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


async def _find_items(env: BaseEnv, prompts: list[str]) -> dict[str, Any]:
    """Return the items of the prompts, without prompts that have no item."""
    if hasattr(env, "item_from_prompt"):
        built_items = {prompt: env.item_from_prompt(prompt) for prompt in prompts}
        return {prompt: item for prompt, item in built_items.items() if item is not None}
    items_by_prompt: dict[str, Any] = {}
    seen_items: set[str] = set()
    repeats = 0
    deadline = time.monotonic() + MAX_SEARCH_S
    for _ in range(MAX_SEARCHED_ITEMS):
        if len(items_by_prompt) == len(set(prompts)) or time.monotonic() > deadline:
            break
        item = await env.get_next_item()
        texts = set(_list_texts(item))
        items_by_prompt.update({prompt: item for prompt in prompts if prompt.strip() in texts})
        repeats = repeats + 1 if repr(item) in seen_items else 0
        if item is None or repeats > max(200, 10 * len(seen_items)):
            break  # The items repeat.
        seen_items.add(repr(item))
    return items_by_prompt


def _list_texts(value: object) -> list[str]:
    """Return every text in an item, however nested."""
    if isinstance(value, str):
        return [value.strip()]
    if isinstance(value, dict):
        value = value.values()
    if hasattr(value, "__iter__"):
        return [text for element in value for text in _list_texts(element)]
    return []


async def _score_item(env: BaseEnv, item: Item, texts: list[str]) -> Json:
    """Return the answers to an item with their scores."""
    group, _ = await env.collect_trajectories(item)
    if not group:
        return {
            "responses": list(texts),
            "scores": [None] * len(texts),
            "note": "the environment returned no group for this prompt",
        }
    return _collect_responses(env, group, texts)


def _collect_responses(env: BaseEnv, group: ScoredDataGroup, texts: list[str]) -> Json:
    """Return the answers and scores of one group, or of several."""
    groups = group if isinstance(group, list) else [group]
    scores = [float(score) for subgroup in groups for score in subgroup["scores"]]
    responses = [
        _read_response(env, subgroup, index)
        for subgroup in groups
        for index in range(len(subgroup["scores"]))
    ]
    if None in responses and len(texts) == len(scores):
        responses = list(texts)
    return {"responses": responses, "scores": scores}


def _read_response(env: BaseEnv, group: Json, index: int) -> str | None:
    """Return the sampled text, or None if the tokens are placeholders."""
    messages = group.get("messages")
    if messages and messages[index]:
        last = messages[index][-1]
        if isinstance(last, dict):
            return str(last.get("content"))
        return str(last)
    if list(group["tokens"][index]) == list(range(len(group["tokens"][index]))):
        return None
    sampled = [token for token in group["masks"][index] if token != -100]
    return str(env.tokenizer.decode(sampled, skip_special_tokens=True))


async def _sample_unscored(env: BaseEnv, prompt: str) -> Json:
    """Return answers to a prompt that no item of the data set has, without scores."""
    response = await env.server.chat_completion(
        messages=[{"role": "user", "content": prompt}],
        n=env.config.group_size,
        max_tokens=256,
        temperature=1.0,
    )
    texts = [choice.message.content or "" for choice in response.choices]
    return {"responses": texts, "scores": [None] * len(texts), "note": NO_ITEM_MESSAGE}
