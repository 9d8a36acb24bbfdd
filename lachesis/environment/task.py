"""An environment of single answers: the items, the splits, the samples, the group and the evaluation are made here; what is
left to write is where items come from and what an answer is worth.

    class Reverse(TaskEnv):
        \"\"\"Write a word backwards.\"\"\"

        name = "reverse"

        def load_dataset(self):
            return [{"question": word} for word in ("stressed", "drawer", "live")]

        def score_answer(self, item, answer):
            return float(answer.strip() == item["question"][::-1])

    if __name__ == "__main__":
        Reverse.cli()
"""

from __future__ import annotations

import contextlib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

from lachesis.environment import data, evaluation
from lachesis.environment.data import Item, Split
from lachesis.environment.outcome import AllInvalid, Outcome, invalid, outcome_of
from lachesis.environment.sampling import Sampled, first_prompt, sample
from lachesis.environment.verifier import Verifier, in_time

Message = dict[str, Any]


class TaskEnvConfig(BaseEnvConfig):
    system_prompt: str | None = Field(None, description="Said before each question, as the system's message")
    max_answer_tokens: int = Field(256, ge=1, le=131_072, description="Most tokens of one answer")
    temperature: float = Field(1.0, gt=0, le=2, description="Of the samples")
    held_out_share: float = Field(0.2, gt=0, lt=1, description="Share of the items that are never trained on")
    most_held_out: int = Field(100, ge=1, description="Most held-out items of an evaluation")
    eval_samples: int = Field(4, ge=1, le=64, description="Answers sampled per held-out item")
    data_seed: int = Field(0, ge=0, description="Seed of the order of the training items")
    verifier_timeout: float = Field(30.0, gt=0, le=3600, description="Seconds for the scoring of one answer")


@dataclass
class Rollout:
    """One answer, or one conversation. `tokens`, `masks` (-100 where nothing is trained on) and `logprobs` (natural; 1.0 where
    the mask is -100) have one length."""

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    answer: str
    """The last thing that the model said."""
    messages: list[Message]
    truncated: bool = False
    """Whether the limit of tokens has cut the answer."""
    sampled_tokens: int = 0
    """Tokens that the model has said."""
    outcome: Outcome = field(default_factory=lambda: invalid("it was not scored"))


class TaskEnv(BaseEnv):
    """Write `load_dataset` and `score_answer` (or `score_rollout`); `prompt` where an item has no field `question`.

    For the check without a model offer `gold(item)`, an answer that is right, and `corrupt(item)`, one that is not.
    """

    env_config_cls = TaskEnvConfig
    config: TaskEnvConfig
    solved: float = 1.0
    """A reward of at least this is a solution; the share of solutions is `percent_correct`."""
    items: Split

    def load_dataset(self) -> Iterable[Item] | Mapping[str, Iterable[Item]]:
        """All items; or those to train on and those to hold out, under `train` and `held_out`. May be a coroutine. An item is
        an object that JSON can hold."""
        raise NotImplementedError(f"{type(self).__name__} needs a method load_dataset(self) that returns items")

    def prompt(self, item: Item) -> str | list[Message]:
        """What is asked: a text, or messages."""
        return str(item["question"])

    def identity(self, item: Item) -> str:
        """What makes two items the same: they are held out together or not at all. What is asked, if nothing else is said."""
        asked = self.prompt(item)
        return asked if isinstance(asked, str) else json.dumps(asked, sort_keys=True)

    def score_answer(self, item: Item, answer: str) -> Any:
        """What an answer is worth: a number, true or false, or numbers by name, whose sum is the reward. May be a coroutine.
        Raise Invalid when the answer is not to blame; return `zero(reason)` to have a kind of failure counted."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a method score_answer(self, item, answer) that returns a number"
        )

    def score_rollout(self, item: Item, rollout: Rollout) -> Any:
        """As `score_answer`, with the lengths and the messages of the rollout."""
        return self.score_answer(item, rollout.answer)

    def score_group(self, item: Item, rollouts: Sequence[Rollout]) -> Any:
        """Write it instead where an answer is worth something only beside the others: one value per rollout, each as from
        `score_answer`. May be a coroutine."""
        raise NotImplementedError

    async def score_text(self, item: Item, answer: str) -> Outcome:
        """What an answer would be worth that somebody gave, as in training."""
        messages = self.messages(item)
        prompt, tokens = first_prompt(self.tokenizer, messages), self.tokenizer.encode(answer, add_special_tokens=False)
        one = Sampled(prompt, tokens, [0.0] * len(tokens), answer, "stop")
        return await self.scored(self.score_rollout, item, _single(messages, one))

    @property
    def scores_texts(self) -> bool:
        """Whether single answers can be scored: one of the two methods for it was written."""
        return any(getattr(type(self), name) is not getattr(TaskEnv, name) for name in ("score_answer", "score_rollout"))

    async def example(self, item: Item, *, right: bool) -> list[Message]:
        """A conversation to imitate before reinforcement begins, whose answer is right or not. Needs `gold` and `corrupt`."""
        answer = self.gold(item) if right else self.corrupt(item)  # type: ignore[attr-defined]
        answer = await answer if inspect.isawaitable(answer) else answer
        return [*self.messages(item), {"role": "assistant", "content": answer}]

    @classmethod
    def config_init(cls) -> tuple[TaskEnvConfig, list[APIServerConfig]]:
        return cls.env_config_cls(wandb_name=cls.name or cls.__name__), [APIServerConfig(server_type="vllm")]

    # What Atropos calls.

    async def setup(self) -> None:
        await self.load()
        self._verifier = Verifier(self.config.verifier_timeout)
        self._rewards: list[Outcome] = []

    async def load(self) -> None:
        """Make the items. Raises DatasetError, and what `load_dataset` raises."""
        found = self.load_dataset()
        found = await found if inspect.isawaitable(found) else found
        most = self.config.most_held_out
        if isinstance(found, Mapping):
            self.items = data.given(found.get("train", ()), found.get("held_out", ()), self.identity, most=most)
        else:
            self.items = data.split(found, self.identity, share=self.config.held_out_share, most=most)
        self.position = 0

    async def get_next_item(self) -> Item:
        item = self.items.item(self.position, self.config.data_seed)
        self.position += 1
        return item

    def seek(self, position: int) -> None:
        """Go on with the item at this place of the order."""
        self.position = position

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "position": self.position})

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup, list[Item]]:
        rollouts = await self.rollouts(item, self.config.group_size)
        self._rewards += [one.outcome for one in rollouts]
        return as_group(rollouts, with_messages=self.config.include_messages), []

    async def evaluate(self, *args: Any, **options: Any) -> None:
        """The held-out items, always the same."""
        started = time.time()
        metrics, samples = await evaluation.evaluate(self)
        await self.evaluate_log(metrics, start_time=started, end_time=time.time(), samples=samples)

    def evaluation_answers(self) -> int:
        """Return how many answers one evaluation samples, for the forecast of a run."""
        return len(self.items.held_out) * self.config.eval_samples

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        seen, self._rewards = self._rewards, []
        found = {f"train/{name}": value for name, value in evaluation.shares(seen, self.solved).items()}
        await super().wandb_log({**(wandb_metrics or {}), **found})

    # How rollouts are made.

    async def rollouts(self, item: Item, count: int, *, split: str = "train") -> list[Rollout]:
        """`count` scored answers to one item. Raises what the server raises."""
        messages = self.messages(item)
        answers = await sample(
            self.server,
            self.tokenizer,
            messages,
            count=count,
            max_tokens=self.config.max_answer_tokens,
            temperature=self.config.temperature,
            most_tokens=self.config.max_token_length,
            split=split,
        )
        made = [_single(messages, one) for one in answers]
        if type(self).score_group is not TaskEnv.score_group:
            await self.compare(item, made)
        else:
            values = await self._verifier.values(self.score_rollout, [(item, one) for one in made])
            for rollout, value in zip(made, values, strict=True):
                rollout.outcome = outcome_of(value)
        return made

    async def compare(self, item: Item, rollouts: Sequence[Rollout]) -> None:
        """Give each of these the outcome that `score_group` says."""
        (found,) = await self._verifier.values(self.score_group, [(item, rollouts)])
        if isinstance(found, list | tuple) and len(found) == len(rollouts):
            outcomes = [outcome_of(value) for value in found]
        else:
            given = f"{len(found)} values" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
            wrong = found if isinstance(found, Outcome) else invalid(f"score_group() gave {given} for {len(rollouts)} rollouts")
            outcomes = [wrong] * len(rollouts)
        for rollout, outcome in zip(rollouts, outcomes, strict=True):
            rollout.outcome = outcome

    async def scored(self, scoring: Callable[..., Any], *values: Any) -> Outcome:
        """What the scoring function says of this, whatever it does: raise, hang, or give something that is no score."""
        (value,) = await self._verifier.values(scoring, [values])
        return outcome_of(value)

    def in_time(self, who: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Raises Invalid when the block, without its waits for samples and for a sandbox, takes longer than
        `verifier_timeout`."""
        return in_time(self.config.verifier_timeout, who)

    def messages(self, item: Item) -> list[Message]:
        """The conversation's beginning: the system's message, if there is one, and the question."""
        asked = self.prompt(item)
        question = [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(one) for one in asked]
        system = [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
        return [*system, *question]


def as_group(rollouts: Sequence[Rollout], *, with_messages: bool = False) -> ScoredDataGroup:
    """What the trainer is sent. An invalid rollout gets the mean of the others as its score, which leaves their advantages as
    they are, and an override that keeps it out of training. Raises Invalid when no rollout is valid."""
    rewards = [one.outcome.reward for one in rollouts if one.outcome.reward is not None]
    if not rewards:
        raise AllInvalid([str(one.outcome.reason) for one in rollouts])
    middle = rewards[0] if len(set(rewards)) == 1 else sum(rewards) / len(rewards)
    group = ScoredDataGroup(
        tokens=[one.tokens for one in rollouts],
        masks=[one.masks if one.outcome.valid else [-100] * len(one.tokens) for one in rollouts],
        scores=[middle if one.outcome.reward is None else one.outcome.reward for one in rollouts],
        inference_logprobs=[one.logprobs for one in rollouts],
        overrides=[_override(one.outcome) for one in rollouts],
    )
    if with_messages:
        group["messages"] = [one.messages for one in rollouts]
    return group


def _override(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {"parts": outcome.parts} if outcome.parts else {}
    if not outcome.valid:
        return {**found, "invalid": outcome.reason, "set_advantage_to_zero": True}
    return {**found, "zero": outcome.reason} if outcome.reason else found


def _single(messages: list[Message], one: Sampled) -> Rollout:
    said = [*messages, {"role": "assistant", "content": one.text}]
    return Rollout(
        tokens=[*one.prompt, *one.tokens],
        masks=[*[-100] * len(one.prompt), *one.tokens],
        logprobs=[*[1.0] * len(one.prompt), *one.logprobs],
        answer=one.text,
        messages=said,
        truncated=one.finish_reason == "length",
        sampled_tokens=len(one.tokens),
    )
