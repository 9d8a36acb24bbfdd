"""Groups that nobody samples: the n-th one is always the same, so that two runs can be compared
number by number.
"""

import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

PROMPT, ANSWER = 4, 6


class Replay(BaseEnv):
    name = "replay"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BaseEnvConfig(wandb_name="replay"), [APIServerConfig(server_type="vllm")]

    async def setup(self) -> None:
        self.count = 0

    async def get_next_item(self) -> int:
        self.count += 1
        return self.count

    async def collect_trajectories(self, item: int) -> tuple[ScoredDataGroup, list[Any]]:
        chance = random.Random(item)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for number in range(self.config.group_size):
            tokens = [chance.randrange(10, 40) for _ in range(PROMPT + ANSWER)]
            group["tokens"].append(tokens)
            group["masks"].append([-100] * PROMPT + tokens[PROMPT:])
            group["inference_logprobs"].append(
                [1.0] * PROMPT + [-chance.random() - 2 for _ in range(ANSWER)]
            )
            # each seventh has no signal
            group["scores"].append(float(number % 2) if item % 7 else 0.0)
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass


if __name__ == "__main__":
    Replay.cli()
