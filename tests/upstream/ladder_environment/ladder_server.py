"""Several files: imports of a neighbour as a folder's program has them, and of a package below it."""

from typing import List, Tuple

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.type_definitions import Item
from ladder_data import ladders
from rewards import steepness
from rewards.bonus import bonus


class LadderEnv(BaseEnv):
    """Say signs in rising order."""

    name = "ladder"

    @classmethod
    def config_init(cls) -> Tuple[BaseEnvConfig, List[APIServerConfig]]:
        env_config = BaseEnvConfig(group_size=8, batch_size=16, max_token_length=128, wandb_name="ladder")
        return env_config, [APIServerConfig(model_name="some/model", base_url="http://localhost:9001/v1", api_key="x")]

    async def setup(self):
        self.items = ladders()
        self.iter = 0

    async def get_next_item(self) -> Item:
        self.iter += 1
        return self.items[(self.iter - 1) % len(self.items)]

    async def collect_trajectories(self, item: Item) -> Tuple[ScoredDataGroup, List[Item]]:
        messages = [{"role": "user", "content": item["start"]}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completions = await managed.chat_completion(messages=messages, n=self.config.group_size, max_tokens=8)
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for choice, node in zip(completions.choices, nodes):
            said = choice.message.content
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(steepness(said) + bonus(said))
        return group, []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    LadderEnv.cli()
