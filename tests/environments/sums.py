"""Sums for tests, with the fault that `kind` names."""

import time
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class SumsConfig(BaseEnvConfig):
    kind: str = "sound"


class Sums(BaseEnv):
    """Sums of two numbers."""

    name = "sums"
    env_config_cls = SumsConfig

    @classmethod
    def config_init(cls) -> Any:
        return SumsConfig(wandb_name="sums"), [APIServerConfig(server_type="openai")]

    async def setup(self) -> None:
        self.count = 0
        if self.config.kind == "never returns":
            time.sleep(600)  # noqa: ASYNC251

    async def get_next_item(self) -> Any:
        self.count += 1
        if self.config.kind == "empty" or (self.config.kind == "short" and self.count > 2):
            return None
        return {"question": f"{self.count}+1=", "answer": str(self.count + 1)}

    def gold(self, item: Any) -> str:
        return str(item["answer"])

    def corrupt(self, item: Any) -> str:
        return str(item["answer"]) + "0"

    async def score_answer(self, item: Any, answer: str) -> Any:
        if self.config.kind == "deaf verifier":
            return 0.5
        right = float(answer == item["answer"])
        return {"nan": float("nan"), "text": "good", "none": None}.get(self.config.kind, right)

    async def collect_trajectories(self, item: Any) -> Any:
        if self.config.kind == "raises" and self.count % 2:
            raise ValueError(f"item {self.count} cannot be read")
        messages = [{"role": "user", "content": item["question"]}]
        answer = await self.server.chat_completion(
            messages=messages, n=self.config.group_size, max_tokens=8
        )
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for choice in answer.choices:
            answer_tokens = self.tokenizer.encode(choice.message.content)
            group["tokens"].append([1, *answer_tokens])
            group["masks"].append([-100, *answer_tokens])
            group["scores"].append(await self.score_answer(item, choice.message.content))
        if self.config.kind == "leaves out" and (self.count > 4 or len(set(group["scores"])) == 1):
            return None, []
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass


if __name__ == "__main__":
    Sums.cli()
