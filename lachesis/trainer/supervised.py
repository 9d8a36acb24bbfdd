"""Examples to imitate before reinforcement begins: a JSONL file with one example per line,

    {"prompt": "2+3=", "completion": "5"}
    {"messages": [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]}

A prompt becomes one user message of the tokenizer's chat template, where it has one. Only the completion, or the last message,
is trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lachesis.base.errors import ConfigError, shorten
from lachesis.base.json_lines import split_lines

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Example:
    """Position i reads `tokens[i]` and predicts `targets[i]`, where `trained` is true."""

    tokens: Array
    targets: Array
    trained: Array


def read(path: Path, tokenizer: Any, *, most_tokens: int) -> list[Example]:
    """The examples of a file. Raises ConfigError, which names the line, for one that is none or has more than `most_tokens`
    tokens."""
    try:
        lines = split_lines(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ConfigError(f"tinker.supervised_file {path} cannot be read: {error}") from error
    examples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt, whole = _tokens(json.loads(line), tokenizer)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}, is no example ({shorten(str(error), 120)}); allowed: an object with prompt and "
                "completion, or with messages of which the last is the assistant's"
            ) from error
        if not prompt < len(whole) <= most_tokens:
            raise ConfigError(
                f"{path}, line {number}, has {len(whole)} tokens, {len(whole) - prompt} of them to learn; allowed: at most "
                f"{most_tokens} (tinker.max_token_trainer_length), at least one to learn"
            )
        tokens = np.asarray(whole, np.int64)
        trained = np.arange(1, len(tokens)) >= max(prompt, 1)
        examples.append(Example(tokens[:-1], tokens[1:], trained))
    if not examples:
        raise ConfigError(f"tinker.supervised_file {path} holds no example")
    return examples


def _tokens(line: Any, tokenizer: Any) -> tuple[int, list[int]]:
    """How many tokens the prompt has, and all tokens."""
    if "messages" in line:
        messages = line["messages"]
        if messages[-1]["role"] != "assistant":
            raise ValueError("the last message is not the assistant's")
        prompt, completion = messages[:-1], messages[-1]["content"]
    else:
        prompt, completion = [{"role": "user", "content": line["prompt"]}], line["completion"]
    if not isinstance(completion, str):
        raise TypeError("the completion is no text")
    if tokenizer.chat_template:
        ids = list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
    else:
        ids = list(tokenizer.encode("".join(one["content"] for one in prompt)))
    answer = list(tokenizer.encode(completion, add_special_tokens=False))
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return len(ids), [*ids, *answer, *end]


def batches(examples: list[Example], *, size: int, epochs: int, seed: int) -> Iterator[list[Example]]:
    """Every example once per epoch, in an order that the seed decides."""
    order = random.Random(seed)
    for _ in range(epochs):
        shuffled = order.sample(examples, len(examples))
        for start in range(0, len(shuffled), size):
            yield shuffled[start : start + size]
