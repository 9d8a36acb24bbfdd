"""Add two small numbers, checked exactly: the smallest task on which a model can be seen to
learn.
"""

import asyncio
import random
import re
import time
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

Item = dict[str, Any]


class ArithmeticConfig(BaseEnvConfig):
    largest: int = Field(default=9, ge=1, le=999, description="Sums of two numbers from 0 to this")
    held_out_share: float = Field(
        default=0.2, gt=0, lt=1, description="Share of the sums that are never trained on"
    )
    max_answer_tokens: int = Field(
        default=8, ge=2, le=64, description="Maximum tokens of one answer"
    )
    eval_samples: int = Field(
        default=16, ge=1, le=64, description="Answers sampled per held-out sum in an evaluation"
    )
    data_seed: int = Field(default=0, ge=0, description="Seed of the order of the training sums")


class ArithmeticEnv(BaseEnv):
    """Sums of two small numbers, answered with the bare number; right is 1, anything else 0."""

    name = "arithmetic"
    env_config_cls = ArithmeticConfig
    config: ArithmeticConfig

    @classmethod
    def config_init(cls) -> tuple[ArithmeticConfig, list[APIServerConfig]]:
        return ArithmeticConfig(wandb_name="arithmetic"), [APIServerConfig(server_type="vllm")]

    async def setup(self) -> None:
        self.load_dataset()

    def load_dataset(self) -> None:
        """Make all sums and split them into training and held-out sums."""
        numbers = range(self.config.largest + 1)
        items: list[Item] = [
            {"question": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers
        ]
        random.Random("arithmetic").shuffle(items)
        num_held_out = max(1, round(len(items) * self.config.held_out_share))
        self.held_out, self.train = items[:num_held_out], items[num_held_out:]
        self.rng = random.Random(self.config.data_seed)
        self.queue: list[Item] = []

    async def get_next_item(self) -> Item:
        if not self.queue:
            self.queue = self.rng.sample(self.train, len(self.train))
        return self.queue.pop()

    def item_from_prompt(self, prompt: str) -> Item | None:
        """Return the item for a prompt of a user's inference test, or None for anything but a
        sum.
        """
        match = re.fullmatch(r"\s*(\d{1,9})\s*\+\s*(\d{1,9})\s*=?\s*", prompt)
        if match is None:
            return None
        a, b = int(match[1]), int(match[2])
        return {"question": f"{a}+{b}=", "answer": str(a + b)}

    def gold(self, item: Item) -> str:
        """Return the right answer, for the check without a model."""
        return str(item["answer"])

    def corrupt(self, item: Item) -> str:
        """Return a wrong answer."""
        return str(int(item["answer"]) + 1)

    def example(self, item: Item, *, right: bool) -> list[dict[str, Any]]:
        """Return a sum with a right or a wrong answer, for training before reinforcement
        learning.
        """
        answer = self.gold(item) if right else self.corrupt(item)
        return [
            {"role": "user", "content": item["question"]},
            {"role": "assistant", "content": answer},
        ]

    def score_answer(self, item: Item, answer: str) -> float:
        """Return 1.0 when the answer is the sum and nothing else, else 0.0."""
        return float(answer.strip() == item["answer"])

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup, list[Item]]:
        messages = [{"role": "user", "content": item["question"]}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=messages,
                n=self.config.group_size,
                max_tokens=self.config.max_answer_tokens,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for choice, node in zip(completion.choices, nodes, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(self.score_answer(item, choice.message.content or ""))
        return group, []

    def evaluation_answers(self) -> int:
        """Return how many answers one evaluation samples, for the forecast of a run."""
        return len(self.held_out) * self.config.eval_samples

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Measure the accuracy on the held-out sums, sampled as in training."""
        started, samples = time.time(), []
        completions = await asyncio.gather(*map(self.sample_answers, self.held_out))
        for item, completion in zip(self.held_out, completions, strict=True):
            for choice in completion.choices:
                answer = choice.message.content or ""
                samples.append(
                    {**item, "model_answer": answer, "score": self.score_answer(item, answer)}
                )
        accuracy = sum(sample["score"] for sample in samples) / len(samples)
        await self.evaluate_log(
            {"eval/percent_correct": accuracy},
            start_time=started,
            end_time=time.time(),
            samples=samples,
        )

    async def sample_answers(self, item: Item) -> Any:
        """Sample the answers to one held-out sum."""
        return await self.server.chat_completion(
            messages=[{"role": "user", "content": item["question"]}],
            n=self.config.eval_samples,
            max_tokens=self.config.max_answer_tokens,
            temperature=1.0,
            split="eval",
        )


if __name__ == "__main__":
    ArithmeticEnv.cli()
