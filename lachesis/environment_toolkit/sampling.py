"""Sample answers as token ids: ids go to the server, and ids with log-probabilities come back.

No sampled text is ever tokenized again. Atropos' managed server finds earlier turns of a
conversation by comparing texts, and appends the template's end-of-turn token even after a model has
generated it. Here a conversation is its token ids, and only the text that the template inserts
between two answers is tokenized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.openai_server import OpenAIServer

from lachesis.environment_toolkit import scoring
from lachesis.models.chat_template import THOUGHT_BEGINS, THOUGHT_ENDS

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.server_manager import ServerManager
    from transformers import PreTrainedTokenizerBase

# Used for tokenizers without a chat template.
FALLBACK_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# Stands for the last answer when the template renders what follows it.
ANSWER_PLACEHOLDER = "\u241f0\u241f"
PLACEHOLDER_LOGPROB = -0.5


QUESTION_TOO_LONG = "the first question is longer than the limit of tokens"
CONVERSATION_TOO_LONG = "the conversation is longer than the limit of tokens"


class PromptTooLongError(Exception):
    """There is no room for another token."""


@dataclass(frozen=True)
class SampledCompletion:
    """Hold one answer; `prompt` holds the token ids that it was sampled after."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    answer: str | None = None
    """The text after the thought of a model that thinks; None if it is the whole text."""

    @property
    def scored_text(self) -> str:
        """Return the text to score: the answer without the thought before it."""
        return self.text if self.answer is None else self.answer


async def sample(
    server: ServerManager,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *,
    count: int,
    max_tokens: int,
    temperature: float,
    max_total_tokens: int,
    split: str,
    prompt: list[int] | None = None,
) -> list[SampledCompletion]:
    """Sample `count` answers to messages or to given token ids.

    The time this takes does not count for `pausable_timeout`. An endpoint that returns text only
    (`server_type: openai`) yields placeholder tokens, which can be scored but not trained on.

    Args:
        server: Atropos' server manager of the environment.
        tokenizer: The tokenizer of the model.
        messages: The conversation so far.
        count: The number of answers.
        max_tokens: The maximum length of an answer in tokens.
        temperature: The sampling temperature.
        max_total_tokens: The maximum length of prompt and answer in tokens; 0 or less for no limit.
        split: `train` or `eval`, which Atropos schedules differently.
        prompt: The token ids of the conversation; by default those of `messages`.

    Raises:
        PromptTooLongError: The prompt leaves no room for an answer.
        Exception: The server failed.
    """
    if isinstance(server.servers[0], OpenAIServer):
        with scoring.pause_timeout():
            return await _sample_texts(server, messages, count, max_tokens, temperature, split)
    ids = encode_first_prompt(tokenizer, messages) if prompt is None else prompt
    max_tokens = _limit_new_tokens(max_tokens, len(ids), max_total_tokens)
    with scoring.pause_timeout():
        _, tokens_G, logprobs_G, finish_reasons_G = await server.tokens_and_logprobs_completion(
            prompt="",
            input_ids=ids,
            n=count,
            temperature=temperature,
            split=split,
            max_tokens=max_tokens,
        )
    if len(tokens_G) != count:
        raise RuntimeError(f"the server returned {len(tokens_G)} samples; requested: {count}")
    return [
        SampledCompletion(
            list(ids),
            list(tokens),
            list(logprobs),
            tokenizer.decode(tokens, skip_special_tokens=True),
            _read_finish_reason(reason),
            find_answer(tokenizer, ids, tokens),
        )
        for tokens, logprobs, reason in zip(tokens_G, logprobs_G, finish_reasons_G, strict=True)
    ]


def find_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int]
) -> str | None:
    """Return the sampled tokens after the thought; None without a thought.

    A thought that was not ended, because the length limit was reached, leaves an empty answer.
    """
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    for end in THOUGHT_ENDS:
        if end in text:
            rest = text.rpartition(end)[2]
            ids = tokenizer.encode(rest, add_special_tokens=False)
            return str(tokenizer.decode(ids, skip_special_tokens=True)).lstrip("\n")
    # The template may have begun the thought, or the model begins it.
    tail = tokenizer.decode(list(prompt)[-8:], skip_special_tokens=False).rstrip()
    if text.lstrip().startswith(THOUGHT_BEGINS) or tail.endswith(THOUGHT_BEGINS):
        return ""
    return None


def _limit_new_tokens(max_tokens: int, num_prompt_tokens: int, max_total_tokens: int) -> int:
    """Return how many tokens an answer may have beside its prompt."""
    if max_total_tokens <= 0:
        return max_tokens
    # Atropos skips groups with a rollout of exactly the maximum length, so one token stays free.
    max_new_tokens = max_total_tokens - num_prompt_tokens - 1
    if max_new_tokens < 1:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens; max_token_length is {max_total_tokens}"
        )
    return min(max_tokens, max_new_tokens)


def encode_first_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]
) -> list[int]:
    """Return the token ids of a conversation in which the model has not answered yet."""
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
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *new_messages: dict[str, Any],
    has_eos: bool,
) -> list[int]:
    """Return the token ids between an answer and the next answer.

    These are the end of the answer's turn, the new messages, and the beginning of the next answer.

    Args:
        tokenizer: The tokenizer of the model.
        messages: The conversation so far; the last message is the answer.
        new_messages: The messages after the answer.
        has_eos: Whether the model has generated its end-of-turn token itself.
    """
    answer = {"role": "assistant", "content": ANSWER_PLACEHOLDER}
    text = tokenizer.apply_chat_template(
        [*messages[:-1], answer, *new_messages],
        chat_template=get_chat_template(tokenizer),
        add_generation_prompt=True,
        tokenize=False,
    )
    following_text = text.rpartition(ANSWER_PLACEHOLDER)[2]
    eos_token = tokenizer.eos_token or ""
    if has_eos and eos_token and following_text.startswith(eos_token):
        following_text = following_text[len(eos_token) :]
    return list(tokenizer.encode(following_text, add_special_tokens=False))


def get_chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's chat template, or a plain one if it has none."""
    return str(tokenizer.chat_template or FALLBACK_CHAT_TEMPLATE)


async def _sample_texts(
    server: ServerManager,
    messages: object,
    count: int,
    max_tokens: int,
    temperature: float,
    split: str,
) -> list[SampledCompletion]:
    """Return answers of a server that gives texts only, with placeholder tokens."""
    response = await server.chat_completion(
        messages=messages, n=count, max_tokens=max_tokens, temperature=temperature, split=split
    )
    if len(response.choices) != count:
        raise RuntimeError(
            f"the server returned {len(response.choices)} samples; requested: {count}"
        )
    # Atropos itself uses these placeholders, by which they are recognised.
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


def _read_finish_reason(finish_reason: object) -> str:
    return str(
        finish_reason.get("type", "stop") if isinstance(finish_reason, dict) else finish_reason
    )
