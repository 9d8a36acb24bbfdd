"""Read examples for supervised fine-tuning from a JSONL file with one example per line.

    {"prompt": "2+3=", "completion": "5"}
    {"messages": [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]}

A prompt becomes one user message of the tokenizer's chat template, if it has one. Only the
completion, or the last message, is trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lachesis.base.arrays import Array
from lachesis.base.errors import ConfigError, shorten
from lachesis.base.json_text import split_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SftExample:
    """Hold one example: position i predicts `targets[i]` where `loss_mask` is true."""

    tokens: Array
    targets: Array
    loss_mask: Array


def read_examples(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int
) -> list[SftExample]:
    """Return the examples in a file.

    Raises:
        ConfigError: The file cannot be read, or a line is not an example or has more than
            `max_tokens` tokens; the message names the line.
    """
    try:
        lines = split_lines(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ConfigError(f"tinker.sft_file {path} cannot be read: {error}") from error
    examples = []
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            num_prompt_tokens, token_ids = _tokenize_example(json.loads(line), tokenizer)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {line_number}, is not an example ({shorten(str(error), 120)}); "
                "allowed: an object with prompt and completion, or with messages of which the last "
                "is the assistant's"
            ) from error
        if not num_prompt_tokens < len(token_ids) <= max_tokens:
            raise ConfigError(
                f"{path}, line {line_number}, has {len(token_ids)} tokens, "
                f"{len(token_ids) - num_prompt_tokens} of them to learn; allowed: at most "
                f"{max_tokens} (tinker.max_token_trainer_length), at least one to learn"
            )
        tokens = np.asarray(token_ids, np.int64)
        loss_mask = np.arange(1, len(tokens)) >= max(num_prompt_tokens, 1)
        examples.append(SftExample(tokens[:-1], tokens[1:], loss_mask))
    if not examples:
        raise ConfigError(f"tinker.sft_file {path} has no examples")
    return examples


def _tokenize_example(record: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, list[int]]:
    """Return the number of prompt tokens, and all tokens."""
    if "messages" in record:
        messages = record["messages"]
        if messages[-1]["role"] != "assistant":
            raise ValueError("the last message is not the assistant's")
        prompt_messages, completion = messages[:-1], messages[-1]["content"]
    else:
        prompt_messages, completion = (
            [{"role": "user", "content": record["prompt"]}],
            record["completion"],
        )
    if not isinstance(completion, str):
        raise TypeError("the completion is not a text")
    if tokenizer.chat_template:
        prompt_ids = list(
            tokenizer.apply_chat_template(
                prompt_messages, add_generation_prompt=True, return_dict=False
            )
        )
    else:
        prompt_ids = list(
            tokenizer.encode("".join(message["content"] for message in prompt_messages))
        )
    completion_ids = list(tokenizer.encode(completion, add_special_tokens=False))
    if tokenizer.eos_token_id is not None:
        end_ids = [tokenizer.eos_token_id]
    else:
        end_ids = []
    return len(prompt_ids), [*prompt_ids, *completion_ids, *end_ids]


def iterate_batches(
    examples: list[SftExample], *, batch_size: int, epochs: int, seed: int
) -> Iterator[list[SftExample]]:
    """Yield every example once per epoch, in an order that depends on the seed."""
    rng = random.Random(seed)
    for _ in range(epochs):
        shuffled = rng.sample(examples, len(examples))
        for start in range(0, len(shuffled), batch_size):
            yield shuffled[start : start + batch_size]
