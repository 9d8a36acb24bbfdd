"""In the child that runs an environment's `process` command for an inference test: what that command lacks.

`python -m lachesis.env_process probe FILE SPEC process --config YAML`, where SPEC is a JSON file with `out`, `tally`,
`samples`, `prompts`, `max_tokens` and `temperature`. What the environment raises costs it a group and is counted; groups that
never come end the process instead of being asked for without end. With prompts, each is answered, and scored by the
environment's own verifier: the environment makes the item itself when it has a method `item_from_prompt(prompt)`, else the
item is looked for among those that `get_next_item()` gives."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from lachesis.env_process import counters
from lachesis.environment.endpoint_errors import is_endpoint_error, is_transport_error

MOST_EMPTY_GROUPS = 8
MOST_SAMPLES = 6
"""Groups whose responses are kept for people to read."""
SEARCHED_ITEMS = 5000
SEARCH_S = 20.0
NO_ITEM = (
    "no item with this prompt was found, so the verifier has nothing to compare with; "
    "an environment may offer item_from_prompt(prompt)"
)
Json = dict[str, Any]


def install(spec: Json) -> counters.Tally:
    """Change Atropos' base class in this process, before the environment's file is run; what is counted from here on."""
    from atroposlib.envs.base import BaseEnv

    start = BaseEnv.cli.__func__
    tally = counters.Tally(Path(spec["tally"]))
    tally.per_group = []
    counters.watch_servers(tally)
    wanted = {name: spec[name] for name in ("max_tokens", "temperature") if spec.get(name) is not None}
    said = _follow_sampling(wanted if spec.get("prompts") else {})

    def cli(cls: Any) -> None:
        counters.watch_environment(tally, cls, give_up_after=MOST_EMPTY_GROUPS)
        if spec.get("prompts"):
            cls.process_manager = _answer_prompts(spec, said)
        else:
            _keep_samples(cls, Path(spec["samples"]), said)
        start(cls)

    BaseEnv.cli = classmethod(cli)
    _name_wandb_run(spec["wandb_run"])
    return tally


def note_failure(tally: counters.Tally, error: BaseException) -> None:
    """Say whose fault the end of this process is."""
    endpoint, transport = is_endpoint_error(error), is_transport_error(error)
    tally.failure = {"kind": "transport" if transport else "endpoint" if endpoint else "environment"}
    tally.write()


def _name_wandb_run(name: str) -> None:
    """Atropos' `process` gives its W&B run a name of its own."""
    import wandb

    original = wandb.init

    def init(*values: Any, **options: Any) -> Any:
        return original(*values, **{**options, "name": name})

    wandb.init = init


def _keep_samples(cls: Any, file: Path, said: Said) -> None:
    """Write what was asked and said, with its scores, for the first groups."""
    collect = cls.collect_trajectories
    kept = 0

    async def collect_trajectories(self: Any, item: Any) -> Any:
        nonlocal kept
        said.clear()
        group, backlog = await collect(self, item)
        if group and kept < MOST_SAMPLES:
            kept += 1
            with contextlib.suppress(Exception):  # a group of an unusual shape is scored all the same
                _append(file, {"prompt": said.prompt or _asked(self, group), **_responses(self, group, said.texts)})
        return group, backlog

    cls.collect_trajectories = collect_trajectories


def _answer_prompts(spec: Json, said: Said) -> Any:
    async def process_manager(self: Any) -> None:
        await self.setup()
        self.config.group_size = self.group_size_to_process
        items = await _items(self, spec["prompts"])
        for prompt in spec["prompts"]:
            item = items.get(prompt)
            said.clear()
            answer = await (_unscored(self, prompt) if item is None else _scored(self, item, said.texts))
            _append(Path(spec["out"]), {"prompt": prompt, **answer})

    return process_manager


class Said:
    """The last prompt, and the texts that came since the last `clear`: an environment that wants tokens is given constants in
    their place by an endpoint that answers with text, and its group has no words."""

    def __init__(self) -> None:
        self.prompt: str | None = None
        self.texts: list[str] = []

    def clear(self) -> None:
        self.prompt = None
        self.texts.clear()


def _follow_sampling(wanted: Json) -> Said:
    """Sample with these settings, and keep what is said."""
    from atroposlib.envs.server_handling.server_baseline import APIServer

    said = Said()
    for name in ("chat_completion", "completion", "tokens_and_logprobs_completion"):
        original = getattr(APIServer, name)

        async def call(self: Any, _original: Any = original, **options: Any) -> Any:
            messages = options.get("messages")
            prompt = messages[-1].get("content") if messages else options.get("prompt")
            said.prompt = said.prompt or (str(prompt)[:2000] if prompt is not None else None)
            answer = await _original(self, **{**options, **wanted})
            for choice in getattr(answer, "choices", ()):
                message = getattr(choice, "message", None)
                said.texts.append((message.content if message else choice.text) or "")
            return answer

        setattr(APIServer, name, call)
    return said


def _asked(env: Any, group: Any) -> str:
    """The text before the first token of the model's own, where ids were sent instead of a text."""
    one = group[0] if isinstance(group, list) else group
    tokens, masks = one["tokens"][0], one["masks"][0]
    first = next((at for at, mask in enumerate(masks) if mask != -100), len(tokens))
    return str(env.tokenizer.decode(tokens[:first]))[:2000]


def _append(file: Path, line: Json) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


async def _items(env: Any, prompts: list[str]) -> dict[str, Any]:
    """An item for each prompt that has one."""
    if hasattr(env, "item_from_prompt"):
        made = {prompt: env.item_from_prompt(prompt) for prompt in prompts}
        return {prompt: item for prompt, item in made.items() if item is not None}
    found: dict[str, Any] = {}
    seen: set[str] = set()
    repeats = 0
    until = time.monotonic() + SEARCH_S
    for _ in range(SEARCHED_ITEMS):
        if len(found) == len(set(prompts)) or time.monotonic() > until:
            break
        item = await env.get_next_item()
        texts = set(_texts(item))
        found.update({prompt: item for prompt in prompts if prompt.strip() in texts})
        repeats = repeats + 1 if repr(item) in seen else 0
        if item is None or repeats > max(200, 10 * len(seen)):
            break  # there is nothing new
        seen.add(repr(item))
    return found


def _texts(value: Any) -> list[str]:
    """Every text in an item, however nested."""
    if isinstance(value, str):
        return [value.strip()]
    if isinstance(value, dict):
        value = value.values()
    return [text for one in value for text in _texts(one)] if hasattr(value, "__iter__") else []


async def _scored(env: Any, item: Any, texts: list[str]) -> Json:
    group, _ = await env.collect_trajectories(item)
    if not group:
        return {
            "responses": list(texts),
            "scores": [None] * len(texts),
            "note": "the environment gave no group for this prompt",
        }
    return _responses(env, group, texts)


def _responses(env: Any, group: Any, texts: list[str]) -> Json:
    groups = group if isinstance(group, list) else [group]
    scores = [float(score) for one in groups for score in one["scores"]]
    responses = [_response(env, one, index) for one in groups for index in range(len(one["scores"]))]
    if None in responses and len(texts) == len(scores):
        responses = list(texts)
    return {"responses": responses, "scores": scores}


def _response(env: Any, group: Json, index: int) -> str | None:
    """What was said; None where the tokens are constants that stand for those of an endpoint that answers with text."""
    messages = group.get("messages")
    if messages and messages[index]:
        last = messages[index][-1]
        return str(last.get("content")) if isinstance(last, dict) else str(last)
    if list(group["tokens"][index]) == list(range(len(group["tokens"][index]))):
        return None
    sampled = [token for token in group["masks"][index] if token != -100]
    return str(env.tokenizer.decode(sampled, skip_special_tokens=True))


async def _unscored(env: Any, prompt: str) -> Json:
    answer = await env.server.chat_completion(
        messages=[{"role": "user", "content": prompt}], n=env.config.group_size, max_tokens=256, temperature=1.0
    )
    texts = [choice.message.content or "" for choice in answer.choices]
    return {"responses": texts, "scores": [None] * len(texts), "note": NO_ITEM}
