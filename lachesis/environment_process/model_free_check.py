"""Run the stages of a validation that need no model.

    import             the file is imported and holds its class
    config             `config_init()` and the values of this launch make a configuration
    dataset            `setup()` ends, and `get_next_item()` returns items
    model-free check   right answers score as right, and corrupted ones as wrong

For the last stage an environment has methods `gold(item)` and `corrupt(item)`, each returning a
text, and `score_answer(item, answer)`; each may be a coroutine. Right means a score above 0, or of
at least `solved` if the class defines it, and a corrupted answer must score lower than the right
one. An environment without these methods passes, and the result says so.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import yaml

from lachesis.base.files import read_cached
from lachesis.base.json_text import Json
from lachesis.base.reward_values import is_score
from lachesis.environment_catalog import fingerprint, requirements
from lachesis.environment_toolkit.failure_reasons import describe_exception
from lachesis.environment_toolkit.rollout import is_solution
from lachesis.models.transformers_import import pause_garbage_collection

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv, Item

STAGE_NAMES = ("import", "config", "dataset", "model-free check")
MAX_ITEMS = 16
# Maximum number of items whose fault the check without a model reports.
MAX_ITEM_FAULTS = 3
# Parts of a reward may add up to slightly less than the whole.


class StageFailed(Exception):
    """The environment has a fault; the text describes it for its author."""


def load_environment_class(file: Path, class_name: str) -> Any:
    """Import the file as a module, inside its package if it has a package, and return the class."""
    name = fingerprint.get_module_name(file)
    with pause_garbage_collection():
        module = importlib.import_module(name) if name else _import_file(file)
    return getattr(module, class_name)


def _import_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"environment_{file.stem}", file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # The loader would open the file again.
    exec(compile(read_cached(file), str(file), "exec", dont_inherit=True), module.__dict__)
    return module


def run_stages(file: Path, *, class_name: str, out: Path, config: Path) -> None:
    """Run the stages until one fails, and append one JSON line per stage to `out`."""
    state: Json = {"file": file, "class": class_name, "yaml": yaml.safe_load(config.read_text())}
    stage_functions: list[Callable[[Json], Any]] = [
        _import_class,
        _build_config,
        _read_items,
        _check_without_model,
    ]
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for name, stage_function in zip(STAGE_NAMES, stage_functions, strict=True):
        started = time.monotonic()
        result: Json = {"stage": name, "ok": True}
        try:
            detail = stage_function(state)
            if inspect.isawaitable(detail):
                result["detail"] = loop.run_until_complete(detail)
            else:
                result["detail"] = detail
        except StageFailed as error:
            result |= {"ok": False, "error": str(error)}
        except BaseException as error:  # An environment may raise SystemExit while it is imported.
            messages = filter(
                None,
                [describe_exception(error, str(file)), requirements.get_import_advice(file, error)],
            )
            result |= {"ok": False, "error": "; ".join(messages)}
            traceback.print_exc()
        result["seconds"] = round(time.monotonic() - started, 2)
        with out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(result) + "\n")
        if not result["ok"]:
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Threads that the environment has started must not keep the child alive.


def _import_class(state: Json) -> Json:
    state["cls"] = load_environment_class(state["file"], state["class"])
    return {"class": state["class"]}


def _build_config(state: Json) -> Json:
    default_config = state["cls"].config_init()[0]
    state["config"] = type(default_config)(
        **{**default_config.model_dump(), **state["yaml"]["env"]}
    )
    return {"config_class": type(default_config).__name__}


async def _read_items(state: Json) -> Json:
    """Set the environment up and return how many items it gives, or why it gives none."""
    from atroposlib.envs.base import APIServerConfig

    servers = [APIServerConfig(**server) for server in state["yaml"]["openai"]]
    env = state["env"] = state["cls"](state["config"], servers)
    await env.setup()
    items: list[Any] = []
    for _ in range(MAX_ITEMS):
        try:
            item = await env.get_next_item()
        except Exception as error:
            if not items:
                place = describe_exception(error, str(state["file"]))
                raise StageFailed(f"get_next_item() raised {place}") from error
            break
        if item is None:
            break
        items.append(item)
    if not items:
        raise StageFailed("the data set is empty: the first get_next_item() returned None")
    state["items"] = items
    result: Json = {"items": len(items), "distinct": len({repr(item) for item in items})}
    if hasattr(env, "build_messages"):  # one of lachesis.environment
        result["prompt"] = _render_prompt(env, items[0])
    count_answers = getattr(env, "evaluation_answers", None)
    if callable(count_answers):
        result["evaluation_answers"] = int(count_answers())
    return result


def _render_prompt(env: Any, item: Item) -> Json:
    """Return an item's prompt as the model sees it: text with special tokens, and ids."""
    from lachesis.environment_toolkit.sampling import encode_first_prompt

    tokens = encode_first_prompt(env.tokenizer, env.build_messages(item))
    return {"text": env.tokenizer.decode(tokens, skip_special_tokens=False), "tokens": tokens}


async def _check_without_model(state: Json) -> Json:
    """Score the environment's own right and wrong answers, and return the faults."""
    env = state["env"]
    missing = [
        name
        for name in ("gold", "corrupt", "score_answer")
        if not callable(getattr(env, name, None))
    ]
    # Environments of lachesis.environment that score conversations cannot score single answers.
    if not getattr(env, "can_score_texts", True):
        missing.append("score_answer")
    if missing:
        return {"offered": False, "missing": missing, "faults": []}
    faults: list[str] = []
    num_gold_right = num_corrupt_wrong = 0
    for item in state["items"]:
        gold_answer = await _await_if_needed(env.gold(item))
        corrupt_answer = await _await_if_needed(env.corrupt(item))
        gold_score = await _score_answer(env, item, gold_answer)
        corrupt_score = await _score_answer(env, item, corrupt_answer)
        num_gold_right += _is_right(env, gold_score)
        num_corrupt_wrong += corrupt_score < gold_score
        if len(faults) >= MAX_ITEM_FAULTS:
            continue
        if not _is_right(env, gold_score):
            faults.append(
                f"gold() returned {gold_answer!r} for {item!r}, which scores {gold_score}; it must "
                f"return a right answer"[:300]
            )
        elif corrupt_score >= gold_score:
            fault = (
                f"corrupt() returned {corrupt_answer!r}, which scores {corrupt_score}, and gold() "
                f"{gold_answer!r}, which scores {gold_score}, for {item!r}"
            )
            faults.append(f"{fault[:240]}; the answer of corrupt() must score less")
    return {
        "offered": True,
        "items": len(state["items"]),
        "gold_right": num_gold_right,
        "corrupt_wrong": num_corrupt_wrong,
        "faults": faults,
    }


async def _score_answer(env: BaseEnv, item: Item, answer: str) -> float:
    """Return the reward of an answer as in training.

    Raises:
        StageFailed: It is not a number.
    """
    if hasattr(env, "score_text"):  # one of lachesis.environment
        outcome = await env.score_text(item, answer)
        if outcome.reward is None:
            raise StageFailed(f"{answer!r}"[:200] + f" could not be scored: {outcome.reason}")
        return float(outcome.reward)
    score = await _await_if_needed(env.score_answer(item, answer))
    if not is_score(score):
        raise StageFailed(
            f"score_answer() returned {score!r} for {answer!r}; a score must be a finite number"
        )
    return float(score)


def _is_right(env: BaseEnv, score: float) -> bool:
    if getattr(env, "solved", None) is None:
        return score > 0
    return is_solution(score, env.solved)


async def _await_if_needed(value: object) -> Any:
    if inspect.isawaitable(value):
        return await value
    return value
