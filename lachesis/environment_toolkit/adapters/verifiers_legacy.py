"""Run environments written for the package `verifiers` (0.1.14 to 0.2) as environments of Atropos.

Its classes SingleTurnEnv, MultiTurnEnv and ToolEnv are supported. Conversations and rewards are
those of the environment, and tokens are those that were sampled.

    class Wordle(VerifiersEnv):
        name = "wordle"

        def load_environment(self):
            return vf.load_environment("wordle")

A reward function that raises makes its rollout invalid, where `verifiers` would count a reward of
0, because the answer may not be to blame.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ResponseTokens, ToolCall, Usage

from lachesis.environment_toolkit import tool_calls
from lachesis.environment_toolkit.dataset import Item
from lachesis.environment_toolkit.failure_reasons import describe_exception
from lachesis.environment_toolkit.rollout import Invalid, Outcome, build_invalid, to_outcome, zero
from lachesis.environment_toolkit.sampling import (
    CONVERSATION_TOO_LONG,
    QUESTION_TOO_LONG,
    PromptTooLongError,
    SampledCompletion,
    encode_first_prompt,
    encode_turn_boundary,
    sample,
)
from lachesis.environment_toolkit.single_turn import Message, Rollout, TaskEnv, TaskEnvConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What is known of a conversation that was given up after its time limit.
GIVEN_UP_STATE = {"trajectory": [], "completion": (), "timed_out": True, "given_up": True}
# The errors that reward functions raised while the current rollout was scored.
reward_errors: contextvars.ContextVar[list[str]] = contextvars.ContextVar("raised")


class VerifiersEnv(TaskEnv):
    """Base of environments that wrap one of `verifiers`: write `load_environment`."""

    env_config_cls = TaskEnvConfig
    config: TaskEnvConfig

    def load_environment(self) -> Any:
        """Return the environment of `verifiers`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method load_environment(self)")

    def load_dataset(self) -> Iterable[Item] | Mapping[str, Iterable[Item]]:
        # It must run in the main thread, because it installs signal handlers.
        self.inner = self.load_environment()
        _record_reward_errors(self.inner.rubric)
        train = [dict(row) for row in self.inner.get_dataset()]
        if self.inner.eval_dataset is None and self.inner.eval_dataset_source is None:
            return train
        return {"train": train, "held_out": [dict(row) for row in self.inner.get_eval_dataset()]}

    def prompt(self, item: Item) -> str | list[Message]:
        question: str | list[Message] = item["prompt"]
        return question

    def identity(self, item: Item) -> str:
        return json.dumps([item["prompt"], item.get("answer")], sort_keys=True, default=str)

    async def sample_rollouts(
        self, item: Item, count: int, *, split: str = "train"
    ) -> list[Rollout]:
        """Return `count` conversations, scored by the environment's own rubric."""
        arguments = {
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_answer_tokens,
        }
        client = VerifiersClient(self, split)

        async def conversation() -> Any:
            try:
                async with self.limit_time("the conversation"):
                    return await self.inner.rollout(
                        dict(item), client, self.config.tokenizer_name, arguments
                    )
            except Invalid:
                return {**GIVEN_UP_STATE, "prompt": item["prompt"]}

        states = await asyncio.gather(*(conversation() for _ in range(count)))
        scored_rollouts = [_build_rollout_of_state(state, self.tokenizer) for state in states]
        outcomes = await self._collect_outcomes(states)
        for rollout, outcome in zip(scored_rollouts, outcomes, strict=True):
            rollout.outcome = outcome
        return scored_rollouts

    async def _collect_outcomes(self, states: Sequence[Any]) -> list[Outcome]:
        """Return each rollout's outcome; a rubric for groups gets all rollouts at once."""
        early_outcomes = [_find_early_outcome(state) for state in states]
        scorable = [
            state for state, outcome in zip(states, early_outcomes, strict=True) if outcome is None
        ]
        if scorable and self.inner.requires_group_rollouts:
            group_outcome = await self.score_safely(self._score_states, scorable)
            scored_outcomes = [
                group_outcome if not group_outcome.is_valid else to_outcome(state["reward"])
                for state in scorable
            ]
        else:
            scored_outcomes = [
                await self.score_safely(self._score_states, [state]) for state in scorable
            ]
        await asyncio.gather(
            *(self.inner.rubric.cleanup(state) for state in states if not state.get("given_up"))
        )
        remaining_outcomes = iter(scored_outcomes)
        return [
            outcome if outcome is not None else next(remaining_outcomes)
            for outcome in early_outcomes
        ]

    async def _score_states(self, states: list[Any]) -> Any:
        """Score these conversations together and return the reward of the first."""
        problems: list[str] = []
        reward_errors.set(problems)
        if self.inner.requires_group_rollouts:
            await self.inner.rubric.score_group(states)
        else:
            await self.inner.rubric.score_rollout(states[0])
        if problems:
            return build_invalid(problems[0])
        return states[0]["reward"]


class VerifiersClient(Client):
    """Give `verifiers` the model's answers with their tokens.

    An answer continues the token ids of the conversation as long as the environment does not change
    earlier messages.
    """

    def __init__(self, env: VerifiersEnv, split: str) -> None:
        super().__init__(env)
        self.env, self.split = env, split

    async def get_response(
        self,
        prompt: Any,
        model: str,
        sampling_args: Mapping[str, Any],
        tools: Any = None,
        *,
        state: Any = None,
        **_: Any,
    ) -> Any:
        """Sample one answer, in place of the request that verifiers would send to a server.

        Raises:
            OverlongPromptError: No room is left for an answer.
            ModelError: The server failed.
        """
        tool_definitions = [
            tool_calls.ToolDefinition(tool.name, tool.description, tool.parameters)
            for tool in tools or ()
        ]
        messages = [_to_message(message) for message in prompt]
        ids = self._encode_prompt(messages, tool_definitions, state["trajectory"] if state else [])
        config = self.env.config
        try:
            (sampled,) = await sample(
                self.env.server, self.env.tokenizer, messages, count=1,
                max_tokens=sampling_args.get("max_tokens") or 256,
                temperature=sampling_args.get("temperature", 1.0),
                max_total_tokens=config.max_token_length, split=self.split,
                prompt=ids,
            )  # fmt: skip
        except PromptTooLongError as error:
            raise vf.OverlongPromptError(str(error)) from error
        except Exception as error:
            raise vf.ModelError(f"{type(error).__name__}: {error}") from error
        return _build_response(sampled, model, tool_definitions)

    def _encode_prompt(
        self,
        messages: list[Message],
        tools: list[tool_calls.ToolDefinition],
        trajectory: Sequence[Any],
    ) -> list[int]:
        """Return the prompt (T,) of the next turn, which continues the earlier tokens."""
        tokenizer = self.env.tokenizer
        if trajectory and trajectory[-1]["tokens"] is not None:
            last = trajectory[-1]
            earlier_messages = [
                _to_message(message) for message in [*last["prompt"], *last["completion"]]
            ]
            if messages[: len(earlier_messages)] == earlier_messages and len(messages) > len(
                earlier_messages
            ):
                sampled = last["tokens"]["completion_ids"]
                ended = bool(sampled) and sampled[-1] == tokenizer.eos_token_id
                boundary_ids = encode_turn_boundary(
                    tokenizer, earlier_messages, *messages[len(earlier_messages) :], has_eos=ended
                )
                return [*last["tokens"]["prompt_ids"], *sampled, *boundary_ids]
        return encode_first_prompt(tokenizer, _add_tools(tokenizer, messages, tools))

    async def _not_supported(self, *values: object, **options: object) -> Any:
        raise NotImplementedError("only get_response() is supported")

    setup_client = to_native_tool = to_native_prompt = get_native_response = _not_supported
    raise_from_native_response = from_native_response = _not_supported

    async def close(self) -> None:
        """Do nothing, because there is nothing to close."""


def _to_message(message: Any) -> Message:
    """Convert a message of `verifiers`, or in OpenAI's format, for the chat template."""
    if isinstance(message, Mapping):
        fields = message
    else:
        fields = message.model_dump(exclude_none=True)
    content = fields.get("content") or ""
    if not isinstance(content, str):
        unsupported_types = [part.get("type") for part in content if part.get("type") != "text"]
        if unsupported_types:
            raise vf.ModelError(
                f"a message contains {unsupported_types[0]}, which a text model cannot read"
            )
        content = "".join(part["text"] for part in content)
    return {"role": fields["role"], "content": content}


def _add_tools(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[tool_calls.ToolDefinition],
) -> list[Message]:
    """Return the messages with the tools described in the system message."""
    if not tools:
        return messages
    text = tool_calls.describe_tools(tools)
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _build_response(
    sampled: SampledCompletion, model: str, tools: list[tool_calls.ToolDefinition]
) -> Any:
    """Return a sampled answer as the library's own clients return theirs."""
    try:
        if tools:
            calls = tool_calls.parse_tool_calls(sampled.text, tools)
        else:
            calls = []
    except tool_calls.MalformedCall:
        calls = []  # It is scored as a plain answer.
    is_truncated = sampled.finish_reason == "length"
    return Response(
        id=uuid.uuid4().hex,
        created=int(time.time()),
        model=model,
        usage=Usage(
            prompt_tokens=len(sampled.prompt),
            reasoning_tokens=0,
            completion_tokens=len(sampled.tokens),
            total_tokens=len(sampled.prompt) + len(sampled.tokens),
        ),
        message=ResponseMessage(
            content=sampled.text,
            tool_calls=[
                ToolCall(
                    id=uuid.uuid4().hex[:8], name=call.name, arguments=json.dumps(call.arguments)
                )
                for call in calls
            ]
            or None,
            finish_reason="length" if is_truncated else "tool_calls" if calls else "stop",
            is_truncated=is_truncated,
            tokens=ResponseTokens(
                prompt_ids=sampled.prompt,
                prompt_mask=[0] * len(sampled.prompt),
                completion_ids=sampled.tokens,
                completion_mask=[1] * len(sampled.tokens),
                completion_logprobs=sampled.logprobs,
            ),
        ),
    )


def _find_early_outcome(state: Any) -> Outcome | None:
    """Return the outcome of a conversation that needs no scoring, or None."""
    if not state["trajectory"] and state.get("prompt_too_long"):
        return build_invalid(QUESTION_TOO_LONG)
    if state.get("prompt_too_long"):
        return zero(CONVERSATION_TOO_LONG)
    if state.get("error") is not None:
        error = state["error"]
        cause = error.__cause__ or error
        return build_invalid(f"{type(error).__name__}: {describe_exception(cause)}")
    if state.get("timed_out"):
        return build_invalid("the environment's time limit was exceeded")
    return None


def _build_rollout_of_state(state: Any, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """Return the rollout of the last part of a conversation in which no earlier message was
    changed.

    That is usually the whole conversation.
    """
    tokens, masks, logprobs = _join_steps(
        [step for step in state["trajectory"] if step["tokens"] is not None]
    )
    if not tokens:  # The model has not answered.
        tokens = encode_first_prompt(
            tokenizer, [_to_message(message) for message in state["prompt"]]
        )
        masks, logprobs = [-100] * len(tokens), [1.0] * len(tokens)
    messages = [
        _to_message(message) for message in [*state["prompt"], *(state["completion"] or ())]
    ]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    return Rollout(
        tokens=tokens,
        masks=masks,
        logprobs=logprobs,
        answer=answers[-1] if answers else "",
        messages=messages,
        truncated=bool(state.get("is_truncated")),
        sampled_tokens=sum(mask != -100 for mask in masks),
    )


def _join_steps(steps: list[Any]) -> tuple[list[int], list[int], list[float]]:
    """Return the tokens, masks and log-probabilities of the last steps that extend each other."""
    # A step extends the one before it if its prompt begins with that one's tokens.
    first = len(steps) - 1
    while first > 0 and _extends(steps[first - 1], steps[first]):
        first -= 1
    tokens: list[int] = []
    masks: list[int] = []
    logprobs: list[float] = []
    for step in steps[max(first, 0) :]:
        step_tokens = step["tokens"]
        num_new = len(step_tokens["prompt_ids"]) - len(tokens)
        tokens = [*step_tokens["prompt_ids"], *step_tokens["completion_ids"]]
        masks += [*[-100] * num_new, *step_tokens["completion_ids"]]
        # Atropos marks the log-probability of a token that was not sampled by 1.0.
        logprobs += [*[1.0] * num_new, *step_tokens["completion_logprobs"]]
    return tokens, masks, logprobs


def _extends(step: Any, later: Any) -> bool:
    before = [*step["tokens"]["prompt_ids"], *step["tokens"]["completion_ids"]]
    return bool(later["tokens"]["prompt_ids"][: len(before)] == before)


def _record_reward_errors(rubric: Any) -> None:
    """Record what reward functions raise, which the rubric counts as a reward of 0."""
    for inner_rubric in getattr(rubric, "rubrics", ()):
        _record_reward_errors(inner_rubric)
    rubric.funcs = [_wrap_reward_function(func) for func in getattr(rubric, "funcs", ())]


def _wrap_reward_function(func: Any) -> Any:
    """Return a reward function that notes its errors."""

    @functools.wraps(func)
    async def call(*values: Any, **named: Any) -> Any:
        """Call the reward function and note its errors, which the library hides."""
        try:
            score = func(*values, **named)
            if inspect.isawaitable(score):
                return await score
            return score
        except Exception as error:
            name = getattr(func, "__name__", "a function")
            reward_errors.get([]).append(f"{name} raised {describe_exception(error)}")
            raise

    return call
