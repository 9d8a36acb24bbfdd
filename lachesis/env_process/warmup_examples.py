"""In a child: conversations of an environment to warm a model up with, of which a share is right."""

from __future__ import annotations

import asyncio
import inspect
import random
from pathlib import Path
from typing import Any

from lachesis.base.json_text import Json
from lachesis.env_process import stages
from lachesis.tiny_model import build


class NoExamplesError(Exception):
    """The environment does not offer any, and what is missing."""


def make_warmup_examples(file: Path, class_name: str, request: Json) -> list[list[Json]]:
    """`count` conversations on training items, `share` of them right; the same ones for the same
    request. `values` are the environment's fields. Raises NoExamples, and what the environment
    raises.
    """
    cls = stages.load_environment_class(file, class_name)
    if not hasattr(cls, "example"):
        raise NoExamplesError(
            f"{class_name} offers no example(item, right=…); a TaskEnv with gold() and corrupt() does"
        )
    default_config = cls.config_init()[0]
    env = cls.__new__(cls)  # there is no server to ask
    env.config = type(default_config)(
        **{**default_config.model_dump(), **request.get("values", {})}
    )
    env.tokenizer = build.build_tokenizer()
    random.seed(request["seed"])  # corrupt() may draw
    return asyncio.run(_draw_examples(env, request))


async def _draw_examples(env: Any, request: Json) -> list[list[Json]]:
    await env.load_items()
    rng = random.Random(request["seed"])
    examples = []
    for _ in range(request["count"]):
        item = await env.get_next_item()
        try:
            example = env.example(item, right=rng.random() < request["share"])
        except AttributeError as error:
            raise NoExamplesError(
                f"{type(env).__name__} offers no {error.name}(item), which examples are made of"
            ) from error
        examples.append(await example if inspect.isawaitable(example) else example)
    return examples
