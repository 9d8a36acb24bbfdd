"""Write environments of single answers: supply the items and the reward of an answer.

Splits, samples, groups and evaluations are made here.

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

import contextlib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

from lachesis.environment_toolkit.dataset import DatasetSplit, Item, build_given_split, split_items
from lachesis.environment_toolkit.evaluation import evaluate_held_out, summarize_outcomes
from lachesis.environment_toolkit.rollout import AllInvalid, Outcome, build_invalid, to_outcome
from lachesis.environment_toolkit.sampling import SampledCompletion, encode_first_prompt, sample
from lachesis.environment_toolkit.scoring import Verifier, limit_time

Message = dict[str, Any]


class TaskEnvConfig(BaseEnvConfig):
    """Fields of every environment written with this package."""

    system_prompt: str | None = Field(None, description="System message before each question")
    max_answer_tokens: int = Field(
        256, ge=1, le=131_072, description="Maximum tokens of one answer"
    )
    temperature: float = Field(1.0, gt=0, le=2, description="Sampling temperature")
    held_out_share: float = Field(
        0.2, gt=0, lt=1, description="Share of the items that are never trained on"
    )
    max_held_out_items: int = Field(100, ge=1, description="Maximum held-out items per evaluation")
    eval_samples: int = Field(4, ge=1, le=64, description="Answers sampled per held-out item")
    data_seed: int = Field(0, ge=0, description="Seed of the order of the training items")
    verifier_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="Maximum seconds to score one answer"
    )


@dataclass
class Rollout:
    """Hold one answer, or one conversation.

    `tokens`, `masks` (-100 where nothing is trained on) and `logprobs` (natural; 1.0 where the mask
    is -100) have the same length.
    """

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    answer: str
    """The last answer of the model, without the thought before it."""
    messages: list[Message]
    truncated: bool = False
    """Whether the token limit has truncated the answer."""
    sampled_tokens: int = 0
    """Number of tokens that the model has generated."""
    outcome: Outcome = field(default_factory=lambda: build_invalid("it was not scored"))


class TaskEnv(BaseEnv):
    """Base of environments of single answers: write `load_dataset` and `score_answer`.

    Write `score_rollout` instead to see lengths and messages, and `prompt` if items have no field
    `question`. For the check without a model, add `gold(item)`, which returns a right answer, and
    `corrupt(item)`, which returns a wrong one.
    """

    env_config_cls = TaskEnvConfig
    config: TaskEnvConfig
    solved: float = 1.0
    """Minimum reward of a solution; `percent_correct` is the share of solutions."""
    items: DatasetSplit

    def load_dataset(self) -> Iterable[Item] | Mapping[str, Iterable[Item]]:
        """Return all items, or a mapping with the keys `train` and `held_out`.

        May be a coroutine. An item is a dictionary that JSON can hold.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method load_dataset(self) that returns items"
        )

    def prompt(self, item: Item) -> str | list[Message]:
        """Return the question for the model: a string, or a list of messages."""
        return str(item["question"])

    def identity(self, item: Item) -> str:
        """Return the key by which two items count as the same, by default their prompt.

        Items of the same identity are all held out or all trained on.
        """
        prompt = self.prompt(item)
        if isinstance(prompt, str):
            return prompt
        return json.dumps(prompt, sort_keys=True)

    def score_answer(self, item: Item, answer: str) -> Any:
        """Return the reward of an answer: a number, a boolean, or numbers by name whose sum is the
        reward.

        May be a coroutine. Raise `Invalid` when the answer is not to blame; return `zero(reason)`
        to have a kind of failure counted.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method score_answer(self, item, answer) that returns "
            "a number"
        )

    def score_rollout(self, item: Item, rollout: Rollout) -> Any:
        """Return the reward of a rollout; like `score_answer`, with its lengths and messages."""
        return self.score_answer(item, rollout.answer)

    def score_group(self, item: Item, rollouts: Sequence[Rollout]) -> Any:
        """Return one reward per rollout, for tasks in which answers are compared with each other.

        Each is in any form that `score_answer` may return. May be a coroutine.
        """
        raise NotImplementedError

    async def score_text(self, item: Item, answer: str) -> Outcome:
        """Score an answer that was not sampled, as in training."""
        messages = self.build_messages(item)
        prompt, tokens = (
            encode_first_prompt(self.tokenizer, messages),
            self.tokenizer.encode(answer, add_special_tokens=False),
        )
        sampled = SampledCompletion(prompt, tokens, [0.0] * len(tokens), answer, "stop")
        return await self.score_safely(self.score_rollout, item, _build_rollout(messages, sampled))

    @property
    def can_score_texts(self) -> bool:
        """Return whether single answers can be scored because a method for it was written."""
        return any(
            getattr(type(self), name) is not getattr(TaskEnv, name)
            for name in ("score_answer", "score_rollout")
        )

    async def example(self, item: Item, *, right: bool) -> list[Message]:
        """Return a conversation with a right or a wrong answer, for training before reinforcement
        learning.

        It needs the methods `gold` and `corrupt`.
        """
        answer = self.gold(item) if right else self.corrupt(item)  # type: ignore[attr-defined]
        answer = await answer if inspect.isawaitable(answer) else answer
        return [*self.build_messages(item), {"role": "assistant", "content": answer}]

    @classmethod
    def config_init(cls) -> tuple[TaskEnvConfig, list[APIServerConfig]]:
        """Return the default configuration and server, as Atropos requires."""
        return cls.env_config_cls(wandb_name=cls.name or cls.__name__), [
            APIServerConfig(server_type="vllm")
        ]

    # --- called by Atropos

    async def setup(self) -> None:
        """Load the items; Atropos calls it once before the first rollout."""
        await self.load_items()
        self._verifier = Verifier(self.config.verifier_timeout_s)
        self._train_outcomes: list[Outcome] = []

    async def load_items(self) -> None:
        """Load and split the items.

        Raises:
            DatasetError: There is nothing to train on or to hold out.
            Exception: Whatever `load_dataset` raises.
        """
        dataset = self.load_dataset()
        dataset = await dataset if inspect.isawaitable(dataset) else dataset
        max_held_out = self.config.max_held_out_items
        if isinstance(dataset, Mapping):
            self.items = build_given_split(
                dataset.get("train", ()),
                dataset.get("held_out", ()),
                self.identity,
                max_held_out=max_held_out,
            )
        else:
            self.items = split_items(
                dataset,
                self.identity,
                held_out_share=self.config.held_out_share,
                max_held_out=max_held_out,
            )
        self.position = 0

    async def get_next_item(self) -> Item:
        """Return the next training item."""
        item = self.items.get_training_item(self.position, self.config.data_seed)
        self.position += 1
        return item

    def seek(self, position: int) -> None:
        """Continue with the training item at this position."""
        self.position = position

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Store the position in the training items with Atropos' checkpoint."""
        super().save_checkpoint(step, {**(data or {}), "position": self.position})

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup, list[Item]]:
        """Return a scored group for one item."""
        rollouts = await self.sample_rollouts(item, self.config.group_size)
        self._train_outcomes += [rollout.outcome for rollout in rollouts]
        return build_scored_group(rollouts, with_messages=self.config.include_messages), []

    async def evaluate(self, *args: object, **options: object) -> None:
        """Evaluate the model on the held-out items, which are the same each time."""
        started = time.time()
        metrics, samples = await evaluate_held_out(self)
        await self.evaluate_log(metrics, start_time=started, end_time=time.time(), samples=samples)

    def evaluation_answers(self) -> int:
        """Return how many answers one evaluation samples, for the forecast of a run."""
        return len(self.items.held_out) * self.config.eval_samples

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add the metrics of the rollouts since the last call to those of Atropos."""
        outcomes, self._train_outcomes = self._train_outcomes, []
        metrics = {
            f"train/{name}": value
            for name, value in summarize_outcomes(outcomes, self.solved).items()
        }
        await super().wandb_log({**(wandb_metrics or {}), **metrics})

    # --- making rollouts

    async def sample_rollouts(
        self, item: Item, count: int, *, split: str = "train"
    ) -> list[Rollout]:
        """Return `count` scored answers to one item.

        Raises:
            Exception: The server failed.
        """
        messages = self.build_messages(item)
        answers = await sample(
            self.server,
            self.tokenizer,
            messages,
            count=count,
            max_tokens=self.config.max_answer_tokens,
            temperature=self.config.temperature,
            max_total_tokens=self.config.max_token_length,
            split=split,
        )
        scored_rollouts = [_build_rollout(messages, sampled) for sampled in answers]
        if type(self).score_group is not TaskEnv.score_group:
            await self.score_together(item, scored_rollouts)
        else:
            values = await self._verifier.score_all(
                self.score_rollout, [(item, rollout) for rollout in scored_rollouts]
            )
            for rollout, value in zip(scored_rollouts, values, strict=True):
                rollout.outcome = to_outcome(value)
        return scored_rollouts

    async def score_together(self, item: Item, rollouts: Sequence[Rollout]) -> None:
        """Set the outcomes that `score_group` returns for these rollouts."""
        (scores,) = await self._verifier.score_all(self.score_group, [(item, rollouts)])
        if isinstance(scores, list | tuple) and len(scores) == len(rollouts):
            outcomes = [to_outcome(value) for value in scores]
        else:
            if isinstance(scores, list | tuple):
                description = f"{len(scores)} values"
            else:
                description = f"a {type(scores).__name__}"
            if isinstance(scores, Outcome):
                failure = scores
            else:
                failure = build_invalid(
                    f"score_group() returned {description} for {len(rollouts)} rollouts"
                )
            outcomes = [failure] * len(rollouts)
        for rollout, outcome in zip(rollouts, outcomes, strict=True):
            rollout.outcome = outcome

    async def score_safely(self, scoring: Callable[..., Any], *values: object) -> Outcome:
        """Return the outcome of a scoring function, whatever it does or raises."""
        (value,) = await self._verifier.score_all(scoring, [values])
        return to_outcome(value)

    def limit_time(self, label: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Return a context manager that raises Invalid when its block takes longer than
        `verifier_timeout_s`.

        Waits for samples and for a sandbox do not count.
        """
        return limit_time(self.config.verifier_timeout_s, label)

    def build_messages(self, item: Item) -> list[Message]:
        """Return the first messages: the system message, if any, and the question."""
        prompt = self.prompt(item)
        if isinstance(prompt, str):
            question = [{"role": "user", "content": prompt}]
        else:
            question = [dict(message) for message in prompt]
        if self.config.system_prompt:
            system = [{"role": "system", "content": self.config.system_prompt}]
        else:
            system = []
        return [*system, *question]


def build_scored_group(
    rollouts: Sequence[Rollout], *, with_messages: bool = False
) -> ScoredDataGroup:
    """Return the group that is sent to the trainer.

    An invalid rollout gets the mean of the others as its score, which leaves their advantages
    unchanged, and an override that excludes it from training.

    Raises:
        AllInvalid: No rollout is valid.
    """
    rewards = [rollout.outcome.reward for rollout in rollouts if rollout.outcome.reward is not None]
    if not rewards:
        raise AllInvalid([str(rollout.outcome.reason) for rollout in rollouts])
    if len(set(rewards)) == 1:
        mean_reward = rewards[0]
    else:
        mean_reward = sum(rewards) / len(rewards)
    group = ScoredDataGroup(
        tokens=[rollout.tokens for rollout in rollouts],
        masks=[
            rollout.masks if rollout.outcome.is_valid else [-100] * len(rollout.tokens)
            for rollout in rollouts
        ],
        scores=[
            mean_reward if rollout.outcome.reward is None else rollout.outcome.reward
            for rollout in rollouts
        ],
        inference_logprobs=[rollout.logprobs for rollout in rollouts],
        overrides=[_build_override(rollout.outcome) for rollout in rollouts],
    )
    if with_messages:
        group["messages"] = [rollout.messages for rollout in rollouts]
    return group


def _build_override(outcome: Outcome) -> dict[str, Any]:
    override: dict[str, Any] = {"parts": outcome.parts} if outcome.parts else {}
    if not outcome.is_valid:
        return {**override, "invalid": outcome.reason, "set_advantage_to_zero": True}
    if outcome.reason:
        return {**override, "zero": outcome.reason}
    return override


def _build_rollout(messages: list[Message], sampled: SampledCompletion) -> Rollout:
    """Return a rollout of one turn: prompt tokens are masked, sampled ones are trained on."""
    conversation = [*messages, {"role": "assistant", "content": sampled.text}]
    return Rollout(
        tokens=[*sampled.prompt, *sampled.tokens],
        masks=[*[-100] * len(sampled.prompt), *sampled.tokens],
        logprobs=[*[1.0] * len(sampled.prompt), *sampled.logprobs],
        answer=sampled.scored_text,
        messages=conversation,
        truncated=sampled.finish_reason == "length",
        sampled_tokens=len(sampled.tokens),
    )
