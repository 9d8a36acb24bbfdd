"""An environment written for `verifiers` (its classes SingleTurnEnv, MultiTurnEnv, ToolEnv; versions 0.1.14 to 0.2), as one of
Atropos: the conversation and the rewards are its own, the tokens are those that were sampled.

    class Wordle(VerifiersEnv):
        name = "wordle"

        def load_environment(self):
            return vf.load_environment("wordle")

A reward function that raises makes its rollout invalid, where `verifiers` would take 0 for it: nobody can tell whether the
answer or the function was to blame.
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
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ResponseTokens, ToolCall, Usage

from lachesis.base.failure_reasons import describe_exception
from lachesis.environment import toolcalls
from lachesis.environment.data import Item
from lachesis.environment.outcome import Invalid, Outcome, invalid, outcome_of, zero
from lachesis.environment.sampling import Sampled, TooLong, between, first_prompt, sample
from lachesis.environment.task import Message, Rollout, TaskEnv, TaskEnvConfig

TOO_LONG = "the conversation is longer than the limit of tokens"
raised: contextvars.ContextVar[list[str]] = contextvars.ContextVar("raised")
"""By reward functions, while a rollout is scored."""


class VerifiersEnv(TaskEnv):
    """Write `load_environment`."""

    env_config_cls = TaskEnvConfig
    config: TaskEnvConfig

    def load_environment(self) -> Any:
        """The environment of `verifiers`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method load_environment(self)")

    def load_dataset(self) -> Iterable[Item] | Mapping[str, Iterable[Item]]:
        self.inner = self.load_environment()  # in the main thread, as it sets handlers of signals
        _listen(self.inner.rubric)
        train = [dict(row) for row in self.inner.get_dataset()]
        if self.inner.eval_dataset is None and self.inner.eval_dataset_source is None:
            return train
        return {"train": train, "held_out": [dict(row) for row in self.inner.get_eval_dataset()]}

    def prompt(self, item: Item) -> str | list[Message]:
        question: str | list[Message] = item["prompt"]
        return question

    def identity(self, item: Item) -> str:
        return json.dumps([item["prompt"], item.get("answer")], sort_keys=True, default=str)

    async def rollouts(self, item: Item, count: int, *, split: str = "train") -> list[Rollout]:
        """`count` conversations at once, scored by the environment's own rubric."""
        arguments = {"temperature": self.config.temperature, "max_tokens": self.config.max_answer_tokens}
        client = Sampler(self, split)

        async def conversation() -> Any:
            try:
                async with self.in_time("the conversation"):
                    return await self.inner.rollout(dict(item), client, self.config.tokenizer_name, arguments)
            except Invalid:
                return {"trajectory": [], "prompt": item["prompt"], "completion": (), "timed_out": True, "given_up": True}

        states = await asyncio.gather(*(conversation() for _ in range(count)))
        made = [_rollout(state, self.tokenizer) for state in states]
        for one, outcome in zip(made, await self._outcomes(states), strict=True):
            one.outcome = outcome
        return made

    async def _outcomes(self, states: Sequence[Any]) -> list[Outcome]:
        lost = [_lost(state) for state in states]
        whole = [state for state, outcome in zip(states, lost, strict=True) if outcome is None]
        if whole and self.inner.requires_group_rollouts:
            found = await self.scored(self._score, whole)
            scored = [found if not found.valid else outcome_of(state["reward"]) for state in whole]
        else:
            scored = [await self.scored(self._score, [state]) for state in whole]
        await asyncio.gather(*(self.inner.rubric.cleanup(state) for state in states if not state.get("given_up")))
        rest = iter(scored)
        return [outcome if outcome is not None else next(rest) for outcome in lost]

    async def _score(self, states: list[Any]) -> Any:
        """Score these together; the reward of the first."""
        problems: list[str] = []
        raised.set(problems)
        if self.inner.requires_group_rollouts:
            await self.inner.rubric.score_group(states)
        else:
            await self.inner.rubric.score_rollout(states[0])
        return invalid(problems[0]) if problems else states[0]["reward"]


class Sampler(Client):
    """Gives `verifiers` the model's answers with their tokens. An answer follows the ids of the conversation before it, as long
    as the environment leaves that as it was."""

    def __init__(self, env: VerifiersEnv, split: str) -> None:
        super().__init__(env)
        self.env, self.split = env, split

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Mapping[str, Any], tools: Any = None, *, state: Any = None, **_: Any
    ) -> Any:
        """Raises OverlongPromptError when there is no room left, and ModelError when the server fails."""
        offered = [toolcalls.Tool(one.name, one.description, one.parameters) for one in tools or ()]
        said = [_plain(message) for message in prompt]
        ids = self._ids(said, offered, state["trajectory"] if state else [])
        config = self.env.config
        try:
            (one,) = await sample(
                self.env.server, self.env.tokenizer, said, count=1, max_tokens=sampling_args.get("max_tokens") or 256,
                temperature=sampling_args.get("temperature", 1.0), most_tokens=config.max_token_length, split=self.split,
                prompt=ids,
            )  # fmt: skip
        except TooLong as error:
            raise vf.OverlongPromptError(str(error)) from error
        except Exception as error:
            raise vf.ModelError(f"{type(error).__name__}: {error}") from error
        return _response(one, model, offered)

    def _ids(self, said: list[Message], tools: list[toolcalls.Tool], before: Sequence[Any]) -> list[int]:
        tokenizer = self.env.tokenizer
        if before and before[-1]["tokens"] is not None:
            last = before[-1]
            known = [_plain(message) for message in [*last["prompt"], *last["completion"]]]
            if said[: len(known)] == known and len(said) > len(known):
                sampled = last["tokens"]["completion_ids"]
                ended = bool(sampled) and sampled[-1] == tokenizer.eos_token_id
                added = between(tokenizer, known, *said[len(known) :], ended=ended)
                return [*last["tokens"]["prompt_ids"], *sampled, *added]
        return first_prompt(tokenizer, _with_tools(tokenizer, said, tools))

    async def _not_asked(self, *values: Any, **options: Any) -> Any:
        raise NotImplementedError("only get_response() is asked for")

    setup_client = to_native_tool = to_native_prompt = get_native_response = _not_asked
    raise_from_native_response = from_native_response = _not_asked

    async def close(self) -> None:
        """There is nothing to close."""


def _plain(message: Any) -> Message:
    """A message of `verifiers`, or of OpenAI's form, as the chat template takes it."""
    found = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    content = found.get("content") or ""
    if not isinstance(content, str):
        others = [part.get("type") for part in content if part.get("type") != "text"]
        if others:
            raise vf.ModelError(f"a message holds {others[0]}, which a model of text cannot read")
        content = "".join(part["text"] for part in content)
    return {"role": found["role"], "content": content}


def _with_tools(tokenizer: Any, said: list[Message], tools: list[toolcalls.Tool]) -> list[Message]:
    """The tools as the system's message, after what it says."""
    if not tools:
        return said
    text = toolcalls.described(tools)
    if said and said[0]["role"] == "system":
        return [{"role": "system", "content": f"{said[0]['content']}\n\n{text}"}, *said[1:]]
    return [{"role": "system", "content": text}, *said]


def _response(one: Sampled, model: str, tools: list[toolcalls.Tool]) -> Any:
    try:
        calls = toolcalls.read(one.text, tools) if tools else []
    except toolcalls.MalformedCall:
        calls = []  # a plain answer, as which it is scored
    cut = one.finish_reason == "length"
    return Response(
        id=uuid.uuid4().hex,
        created=int(time.time()),
        model=model,
        usage=Usage(
            prompt_tokens=len(one.prompt),
            reasoning_tokens=0,
            completion_tokens=len(one.tokens),
            total_tokens=len(one.prompt) + len(one.tokens),
        ),
        message=ResponseMessage(
            content=one.text,
            tool_calls=[
                ToolCall(id=uuid.uuid4().hex[:8], name=call.name, arguments=json.dumps(call.arguments)) for call in calls
            ]
            or None,
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            is_truncated=cut,
            tokens=ResponseTokens(
                prompt_ids=one.prompt,
                prompt_mask=[0] * len(one.prompt),
                completion_ids=one.tokens,
                completion_mask=[1] * len(one.tokens),
                completion_logprobs=one.logprobs,
            ),
        ),
    )


def _lost(state: Any) -> Outcome | None:
    """What became of a conversation that is not scored."""
    if not state["trajectory"] and state.get("prompt_too_long"):
        return invalid("the first question is longer than the limit of tokens")
    if state.get("prompt_too_long"):
        return zero(TOO_LONG)
    if state.get("error") is not None:
        error = state["error"]
        cause = error.__cause__ or error
        return invalid(f"{type(error).__name__}: {describe_exception(cause)}")
    return invalid("the environment's time limit was over") if state.get("timed_out") else None


def _rollout(state: Any, tokenizer: Any) -> Rollout:
    """The tokens of the conversation's last piece that no message of which was changed: mostly all of it."""
    steps = [step for step in state["trajectory"] if step["tokens"] is not None]
    first = len(steps) - 1
    while first > 0 and _extends(steps[first - 1], steps[first]):
        first -= 1
    tokens: list[int] = []
    masks: list[int] = []
    logprobs: list[float] = []
    for step in steps[max(first, 0) :]:
        found = step["tokens"]
        new = len(found["prompt_ids"]) - len(tokens)
        tokens = [*found["prompt_ids"], *found["completion_ids"]]
        masks += [*[-100] * new, *found["completion_ids"]]
        logprobs += [*[1.0] * new, *found["completion_logprobs"]]
    if not tokens:  # nothing was said
        tokens = first_prompt(tokenizer, [_plain(message) for message in state["prompt"]])
        masks, logprobs = [-100] * len(tokens), [1.0] * len(tokens)
    said = [_plain(message) for message in [*state["prompt"], *(state["completion"] or ())]]
    return Rollout(
        tokens=tokens,
        masks=masks,
        logprobs=logprobs,
        answer=next((one["content"] for one in reversed(said) if one["role"] == "assistant"), ""),
        messages=said,
        truncated=bool(state.get("is_truncated")),
        sampled_tokens=sum(mask != -100 for mask in masks),
    )


def _extends(step: Any, later: Any) -> bool:
    before = [*step["tokens"]["prompt_ids"], *step["tokens"]["completion_ids"]]
    return bool(later["tokens"]["prompt_ids"][: len(before)] == before)


def _listen(rubric: Any) -> None:
    """Note what the reward functions raise, which the rubric takes for 0."""
    for one in getattr(rubric, "rubrics", ()):
        _listen(one)
    rubric.funcs = [_noting(func) for func in getattr(rubric, "funcs", ())]


def _noting(func: Any) -> Any:
    @functools.wraps(func)
    async def call(*values: Any, **named: Any) -> Any:
        try:
            found = func(*values, **named)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:
            name = getattr(func, "__name__", "a function")
            raised.get([]).append(f"{name} raised {describe_exception(error)}")
            raise

    return call
