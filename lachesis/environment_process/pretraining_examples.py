"""Make conversations of an environment for warming up a model; a share of them is right."""

from __future__ import annotations

import asyncio
import inspect
import random
from pathlib import Path
from typing import TYPE_CHECKING

from lachesis.base.json_text import Json
from lachesis.environment_process import model_free_check
from lachesis.tiny_model import build

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv


class NoExamplesError(Exception):
    """The environment cannot make examples; the message names the missing method."""


def make_warmup_examples(file: Path, class_name: str, request: Json) -> list[list[Json]]:
    """Return conversations on training items; the same request yields the same conversations.

    Args:
        file: The environment's file.
        class_name: The name of its class.
        request: `count`, the `share` of right answers, a `seed`, and the `values` of the fields.

    Raises:
        NoExamplesError: The environment cannot make examples.
        Exception: Whatever the environment raises.
    """
    cls = model_free_check.load_environment_class(file, class_name)
    if not hasattr(cls, "example"):
        raise NoExamplesError(
            f"{class_name} has no method example(item, right=…); a TaskEnv with gold() and "
            "corrupt() has one"
        )
    default_config = cls.config_init()[0]
    env = cls.__new__(cls)  # Without the constructor, because there is no server.
    env.config = type(default_config)(
        **{**default_config.model_dump(), **request.get("values", {})}
    )
    env.tokenizer = build.build_tokenizer()
    random.seed(request["seed"])  # corrupt() may use random numbers.
    return asyncio.run(_draw_examples(env, request))


async def _draw_examples(env: BaseEnv, request: Json) -> list[list[Json]]:
    """Return right and wrong conversations for items of the environment."""
    # Only a TaskEnv can load its items without the rest of its setup.
    await getattr(env, "load_items", env.setup)()
    rng = random.Random(request["seed"])
    examples = []
    for _ in range(request["count"]):
        item = await env.get_next_item()
        try:
            example = env.example(item, right=rng.random() < request["share"])
        except AttributeError as error:
            raise NoExamplesError(
                f"{type(env).__name__} has no method {error.name}(item), which examples are made "
                f"with"
            ) from error
        examples.append(await example if inspect.isawaitable(example) else example)
    return examples
