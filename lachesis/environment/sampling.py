"""Samples with the tokens that were sampled: ids go to the server, ids and log-probabilities come back, and no text is ever
tokenised again.

Atropos' managed server finds the earlier turns of a conversation by comparing texts, and then appends the template's
end-of-turn token to one that the model has said itself. Here a conversation is its token ids, and only what the template puts
between two answers is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.openai_server import OpenAIServer

from lachesis.environment import clock

PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""For a tokenizer that has no chat template of its own."""
MARK = "\u241f0\u241f"
"""Stands for the last answer while the template is asked what follows one."""
PLACEHOLDER_LOGPROB = -0.5


class TooLong(Exception):
    """There is no room for another token."""


@dataclass(frozen=True)
class Sampled:
    """One answer. `prompt` are the ids it was sampled after."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str


async def sample(
    server: Any, tokenizer: Any, messages: list[dict[str, Any]], *, count: int, max_tokens: int, temperature: float,
    most_tokens: int, split: str, prompt: list[int] | None = None,
) -> list[Sampled]:  # fmt: skip
    """`count` answers to the messages, or to these ids. No limit of `clock` counts the time that takes. An endpoint that
    answers with text alone (`server_type: openai`) gives constants for tokens, which are good for scores and for nothing else.

    Raises TooLong when prompt and answer do not fit `most_tokens`, and what the server raises.
    """
    if isinstance(server.servers[0], OpenAIServer):
        with clock.uncounted():
            return await _texts(server, messages, count, max_tokens, temperature, split)
    ids = prompt if prompt is not None else first_prompt(tokenizer, messages)
    room = most_tokens - len(ids) - 1
    if most_tokens > 0 and room < 1:
        raise TooLong(f"the prompt has {len(ids)} tokens; max_token_length is {most_tokens}")
    with clock.uncounted():
        _, tokens_G, logprobs_G, reasons_G = await server.tokens_and_logprobs_completion(
            prompt="", input_ids=ids, n=count, temperature=temperature, split=split,
            max_tokens=min(max_tokens, room) if most_tokens > 0 else max_tokens,
        )  # fmt: skip
    if len(tokens_G) != count:
        raise RuntimeError(f"the server gave {len(tokens_G)} samples; asked for: {count}")
    return [
        Sampled(list(ids), list(tokens), list(logprobs), tokenizer.decode(tokens, skip_special_tokens=True), _reason(reason))
        for tokens, logprobs, reason in zip(tokens_G, logprobs_G, reasons_G, strict=True)
    ]


def first_prompt(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """The ids of a conversation that the model has said nothing in."""
    return list(
        tokenizer.apply_chat_template(
            messages, chat_template=template(tokenizer), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )


def between(tokenizer: Any, messages: list[dict[str, Any]], *new: dict[str, Any], ended: bool) -> list[int]:
    """The ids between an answer, which is the last of `messages`, and the next: the end of its turn, the new messages, the
    beginning of the next answer. `ended` says that the model has said its end-of-turn token itself."""
    marked = [*messages[:-1], {"role": "assistant", "content": MARK}, *new]
    text = tokenizer.apply_chat_template(marked, chat_template=template(tokenizer), add_generation_prompt=True, tokenize=False)
    after = text.rpartition(MARK)[2]
    end = tokenizer.eos_token or ""
    if ended and end and after.startswith(end):
        after = after[len(end) :]
    return list(tokenizer.encode(after, add_special_tokens=False))


def template(tokenizer: Any) -> str:
    return str(tokenizer.chat_template or PLAIN)


async def _texts(server: Any, messages: Any, count: int, max_tokens: int, temperature: float, split: str) -> list[Sampled]:
    answer = await server.chat_completion(
        messages=messages, n=count, max_tokens=max_tokens, temperature=temperature, split=split
    )
    if len(answer.choices) != count:
        raise RuntimeError(f"the server gave {len(answer.choices)} samples; asked for: {count}")
    dummy = list(range(128))  # as Atropos' own stand-in for tokens, by which they are known
    return [
        Sampled([], dummy, [PLACEHOLDER_LOGPROB] * len(dummy), choice.message.content or "", choice.finish_reason or "stop")
        for choice in answer.choices
    ]


def _reason(found: Any) -> str:
    return str(found.get("type", "stop") if isinstance(found, dict) else found)
