"""Samples with the tokens that were sampled: ids go to the server, ids and log-probabilities come
back, and no text is ever tokenised again.

Atropos' managed server finds the earlier turns of a conversation by comparing texts, and then
appends the template's end-of-turn token to one that the model has said itself. Here a conversation
is its token ids, and only what the template puts between two answers is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.openai_server import OpenAIServer

from lachesis.environment import timeouts

FALLBACK_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""For a tokenizer that has no chat template of its own."""
ANSWER_PLACEHOLDER = "\u241f0\u241f"
"""Stands for the last answer while the template is asked what follows one."""
PLACEHOLDER_LOGPROB = -0.5


class PromptTooLongError(Exception):
    """There is no room for another token."""


@dataclass(frozen=True)
class SampledCompletion:
    """One answer. `prompt` are the ids it was sampled after."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str


async def sample(
    server: Any, tokenizer: Any, messages: list[dict[str, Any]], *, count: int, max_tokens: int, temperature: float,
    max_total_tokens: int, split: str, prompt: list[int] | None = None,
) -> list[SampledCompletion]:  # fmt: skip
    """`count` answers to the messages, or to these ids. No limit of `clock` counts the time that
    takes. An endpoint that answers with text alone (`server_type: openai`) gives constants for
    tokens, which are good for scores and for nothing else.

    Raises TooLong when prompt and answer do not fit `most_tokens`, and what the server raises.
    """
    if isinstance(server.servers[0], OpenAIServer):
        with timeouts.pause_timeout():
            return await _sample_texts(server, messages, count, max_tokens, temperature, split)
    ids = prompt if prompt is not None else encode_first_prompt(tokenizer, messages)
    max_new_tokens = max_total_tokens - len(ids) - 1
    if max_total_tokens > 0 and max_new_tokens < 1:
        raise PromptTooLongError(
            f"the prompt has {len(ids)} tokens; max_token_length is {max_total_tokens}"
        )
    with timeouts.pause_timeout():
        _, tokens_G, logprobs_G, finish_reasons_G = await server.tokens_and_logprobs_completion(
            prompt="", input_ids=ids, n=count, temperature=temperature, split=split,
            max_tokens=min(max_tokens, max_new_tokens) if max_total_tokens > 0 else max_tokens,
        )  # fmt: skip
    if len(tokens_G) != count:
        raise RuntimeError(f"the server gave {len(tokens_G)} samples; asked for: {count}")
    return [
        SampledCompletion(
            list(ids),
            list(tokens),
            list(logprobs),
            tokenizer.decode(tokens, skip_special_tokens=True),
            _read_finish_reason(reason),
        )
        for tokens, logprobs, reason in zip(tokens_G, logprobs_G, finish_reasons_G, strict=True)
    ]


def encode_first_prompt(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """The ids of a conversation that the model has said nothing in."""
    return list(
        tokenizer.apply_chat_template(
            messages,
            chat_template=get_chat_template(tokenizer),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    )


def encode_turn_boundary(
    tokenizer: Any, messages: list[dict[str, Any]], *new_messages: dict[str, Any], has_eos: bool
) -> list[int]:
    """The ids between an answer, which is the last of `messages`, and the next: the end of its
    turn, the new messages, the beginning of the next answer. `ended` says that the model has said
    its end-of-turn token itself.
    """
    messages_with_placeholder = [
        *messages[:-1],
        {"role": "assistant", "content": ANSWER_PLACEHOLDER},
        *new_messages,
    ]
    text = tokenizer.apply_chat_template(
        messages_with_placeholder,
        chat_template=get_chat_template(tokenizer),
        add_generation_prompt=True,
        tokenize=False,
    )
    following_text = text.rpartition(ANSWER_PLACEHOLDER)[2]
    eos_token = tokenizer.eos_token or ""
    if has_eos and eos_token and following_text.startswith(eos_token):
        following_text = following_text[len(eos_token) :]
    return list(tokenizer.encode(following_text, add_special_tokens=False))


def get_chat_template(tokenizer: Any) -> str:
    return str(tokenizer.chat_template or FALLBACK_CHAT_TEMPLATE)


async def _sample_texts(
    server: Any, messages: Any, count: int, max_tokens: int, temperature: float, split: str
) -> list[SampledCompletion]:
    response = await server.chat_completion(
        messages=messages, n=count, max_tokens=max_tokens, temperature=temperature, split=split
    )
    if len(response.choices) != count:
        raise RuntimeError(f"the server gave {len(response.choices)} samples; asked for: {count}")
    # as Atropos' own stand-in for tokens, by which they are known
    placeholder_tokens = list(range(128))
    return [
        SampledCompletion(
            [],
            placeholder_tokens,
            [PLACEHOLDER_LOGPROB] * len(placeholder_tokens),
            choice.message.content or "",
            choice.finish_reason or "stop",
        )
        for choice in response.choices
    ]


def _read_finish_reason(finish_reason: Any) -> str:
    return str(
        finish_reason.get("type", "stop") if isinstance(finish_reason, dict) else finish_reason
    )
