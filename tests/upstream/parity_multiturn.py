"""Two turns; `collect_trajectory` for one rollout, as Atropos' own default gathers them; a base class of its own in between."""

import random
from typing import List, Optional, Tuple

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem
from atroposlib.type_definitions import Item


class TwoTurnEnv(BaseEnv):
    """What games of two turns have in common."""

    first = "Say something."

    @classmethod
    def config_init(cls) -> Tuple[BaseEnvConfig, List[APIServerConfig]]:
        env_config = BaseEnvConfig(group_size=8, batch_size=16, max_token_length=128, wandb_name=cls.name)
        return env_config, [APIServerConfig(model_name="some/model", base_url="http://localhost:9001/v1", api_key="x")]

    async def setup(self):
        self.rng = random.Random(7)

    async def get_next_item(self) -> Item:
        return {"even": self.rng.random() < 0.5}

    async def collect_trajectory(self, item: Item) -> Tuple[Optional[ScoredDataItem], List[Item]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            messages = [{"role": "user", "content": self.first}]
            for follow_up in (self.follow_up(item), None):
                completion = await managed.chat_completion(messages=messages, n=1, max_tokens=6, temperature=1.0)
                messages.append({"role": "assistant", "content": completion.choices[0].message.content})
                if follow_up is not None:
                    messages.append({"role": "user", "content": follow_up})
            node = managed.get_state()["nodes"][-1]
        scored = ScoredDataItem(
            tokens=node.tokens,
            masks=node.masked_tokens,
            scores=self.reward(item, messages[-1]["content"]),
            inference_logprobs=node.logprobs,
        )
        return scored, []

    def follow_up(self, item: Item) -> str:
        raise NotImplementedError

    def reward(self, item: Item, said: str) -> float:
        raise NotImplementedError

    async def evaluate(self, *args, **kwargs):
        pass


class ParityEnv(TwoTurnEnv):
    """Say an even or an odd number of signs."""

    name = "parity"

    def follow_up(self, item: Item) -> str:
        return "even" if item["even"] else "odd"

    def reward(self, item: Item, said: str) -> float:
        return 1.0 if (len(said) % 2 == 0) == item["even"] else 0.0


if __name__ == "__main__":
    ParityEnv.cli()
