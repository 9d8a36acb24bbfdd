"""Write environments of several turns: `play` holds one conversation and returns its reward.

class Guess(ConversationEnv):
    name = "guess"

    def load_dataset(self):
        return [{"number": number} for number in range(100)]

    def prompt(self, item):
        return "Guess my number, from 0 to 99."

    def identity(self, item):
        return str(item["number"])

    async def play(self, item, chat):
        answer = await chat.answer()
        for _ in range(self.config.max_turns - 1):
            if answer.strip() == str(item["number"]):
                break
            answer = await chat.answer("no, another one")
        return float(answer.strip() == str(item["number"]))
"""

import asyncio
from typing import Any

from pydantic import Field

from lachesis.environment_toolkit.dataset import Item
from lachesis.environment_toolkit.failure_reasons import describe_exception, is_endpoint_error
from lachesis.environment_toolkit.rollout import Invalid, Outcome, build_invalid, to_outcome, zero
from lachesis.environment_toolkit.sampling import (
    CONVERSATION_TOO_LONG,
    QUESTION_TOO_LONG,
    PromptTooLongError,
    encode_first_prompt,
    encode_turn_boundary,
    sample,
)
from lachesis.environment_toolkit.single_turn import Message, Rollout, TaskEnv, TaskEnvConfig


class ConversationEnvConfig(TaskEnvConfig):
    """Add the limit of turns to the fields of `TaskEnvConfig`."""

    max_turns: int = Field(8, ge=1, le=1000, description="Maximum answers in one conversation")


class Chat:
    """Hold one conversation.

    Its token ids are kept as they were sampled; the text between two answers is tokenized once.
    """

    def __init__(self, env: "ConversationEnv", messages: list[Message], split: str) -> None:
        self.env, self.messages, self.split = env, messages, split
        self.answers: list[str] = []
        # Whether the token limit has truncated the last answer.
        self.truncated = False
        self._tokens: list[int] = []
        self._masks: list[int] = []
        self._logprobs: list[float] = []

    async def answer(
        self, message: str | Message | None = None, *, max_tokens: int | None = None
    ) -> str:
        """Send `message` (a string becomes the user's message) and return the sampled answer.

        Args:
            message: The next message; None to get the first answer.
            max_tokens: The maximum length of this answer; by default `max_answer_tokens`.

        Raises:
            PromptTooLongError: No room is left. If `play` lets it pass, the rollout is a zero.
            Exception: The server failed. If `play` lets it pass, the rollout is invalid.
        """
        config, tokenizer = self.env.config, self.env.tokenizer
        messages, prompt_ids = self._build_prompt(message)
        (sampled,) = await sample(
            self.env.server, tokenizer, messages, count=1,
            max_tokens=max_tokens or config.max_answer_tokens,
            temperature=config.temperature, max_total_tokens=config.max_token_length,
            split=self.split, prompt=prompt_ids,
        )  # fmt: skip
        num_new = len(sampled.prompt) - len(self._tokens)
        self._tokens = [*sampled.prompt, *sampled.tokens]
        self._masks += [*[-100] * num_new, *sampled.tokens]
        self._logprobs += [*[1.0] * num_new, *sampled.logprobs]
        self._ended_with_eos = bool(sampled.tokens) and sampled.tokens[-1] == tokenizer.eos_token_id
        self.truncated = sampled.finish_reason == "length"
        self.answers.append(sampled.scored_text)
        self.messages = [*messages, {"role": "assistant", "content": sampled.text}]
        return sampled.scored_text

    def _build_prompt(self, message: str | Message | None) -> tuple[list[Message], list[int]]:
        """Return the messages to be answered and their token ids.

        `self.messages` changes only after the server has answered.
        """
        if message is None:
            if self.answers:
                raise ValueError("only the first answer can be asked for without a message")
            return self.messages, encode_first_prompt(self.env.tokenizer, self.messages)
        if isinstance(message, str):
            new_message = {"role": "user", "content": message}
        else:
            new_message = dict(message)
        messages = [*self.messages, new_message]
        if not self.answers:
            return messages, encode_first_prompt(self.env.tokenizer, messages)
        return messages, [
            *self._tokens,
            *encode_turn_boundary(
                self.env.tokenizer, self.messages, new_message, has_eos=self._ended_with_eos
            ),
        ]

    def build_rollout(self, outcome: Outcome) -> Rollout:
        """Return the conversation as the rollout that is sent to the trainer."""
        answer = self.answers[-1] if self.answers else ""
        num_sampled = sum(mask != -100 for mask in self._masks)
        tokens = (
            self._tokens
            or encode_first_prompt(self.env.tokenizer, self.messages)[
                : self.env.config.max_token_length - 2
            ]
        )
        return Rollout(
            tokens=tokens,
            masks=self._masks or [-100] * len(tokens),
            logprobs=self._logprobs or [1.0] * len(tokens),
            answer=answer,
            messages=self.messages,
            truncated=self.truncated,
            sampled_tokens=num_sampled,
            outcome=outcome,
        )


class ConversationEnv(TaskEnv):
    """Base of environments of several turns: write `load_dataset`, `prompt` and `play`."""

    env_config_cls = ConversationEnvConfig
    config: ConversationEnvConfig

    async def play(self, item: Item, chat: Chat) -> Any:
        """Hold one conversation and return its reward in any form that `score_answer` may return.

        Run blocking calls with `asyncio.to_thread`, because all conversations share one process.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method play(self, item, chat) that returns a number"
        )

    async def sample_rollouts(
        self, item: Item, count: int, *, split: str = "train"
    ) -> list[Rollout]:
        """Return `count` conversations that run concurrently.

        A conversation whose samples fail becomes invalid; the others are not affected.
        """
        scored_rollouts = list(
            await asyncio.gather(*(self._play_conversation(item, split) for _ in range(count)))
        )
        if type(self).score_group is not TaskEnv.score_group:
            await self.score_together(
                item, [rollout for rollout in scored_rollouts if rollout.outcome.is_valid]
            )
        return scored_rollouts

    async def _play_conversation(self, item: Item, split: str) -> Rollout:
        """Return one played conversation with its outcome; what fails makes it invalid."""
        chat = Chat(self, self.build_messages(item), split)
        try:
            async with self.limit_time("play(), without what was sampled,"):
                outcome = to_outcome(await self.play(item, chat))
        except PromptTooLongError:
            if chat.answers:
                outcome = zero(CONVERSATION_TOO_LONG)
            else:
                outcome = build_invalid(QUESTION_TOO_LONG)
        except Invalid as error:
            outcome = build_invalid(str(error))
        except Exception as error:
            if is_endpoint_error(error):
                kind = "the server failed"
            else:
                kind = "play() raised"
            outcome = build_invalid(f"{kind}: {describe_exception(error)}")
        return chat.build_rollout(outcome)
