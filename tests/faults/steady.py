"""Sums at a gentle pace for tests of faults; `mode` names a fault of its own."""

import asyncio
import re
import subprocess
import sys
import time
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

LINE = "x" * 4095


class SteadyConfig(BaseEnvConfig):
    mode: str = Field(default="", description="forks, prints, raises, blocks, locks or evaluates")
    gigabytes: float = Field(default=1.0, description="What `prints` writes to its log")
    pause_s: float = Field(
        default=0.25,
        description="Before each item; runs that train on must leave the cores to others",
    )


class Steady(BaseEnv):
    """Sums of two numbers."""

    name = "steady"
    env_config_cls = SteadyConfig

    @classmethod
    def config_init(cls) -> Any:
        return SteadyConfig(wandb_name="steady"), [APIServerConfig(server_type="vllm")]

    async def setup(self) -> None:
        self.count = 0
        deaf = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        )
        sleep = [sys.executable, "-c", deaf]
        # children in its own group and in one of their own, which no SIGTERM ends
        if self.config.mode == "forks":
            for own_session in (False, True):
                subprocess.Popen(sleep, start_new_session=own_session)  # noqa: ASYNC220

    async def get_next_item(self) -> Any:
        await asyncio.sleep(self.config.pause_s)
        self.count += 1
        if self.config.mode == "prints" and self.count == 20:
            for _ in range(int(self.config.gigabytes * 2**30 / 4096)):
                print(LINE, flush=False)
        return self.count

    async def collect_trajectories(self, item: int) -> Any:
        if self.config.mode == "raises":
            raise KeyError("answer")
        if self.config.mode == "blocks" and item >= 20:
            _verify_slowly()
        if self.config.mode == "locks" and item >= 20:
            _verify_by_pattern()
        question = f"{item % 10}+{item // 10 % 10}="
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=[{"role": "user", "content": question}],
                n=self.config.group_size,
                max_tokens=4,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for index, node in enumerate(nodes):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(float((item + index) % 2))
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.config.mode == "evaluates":
            await asyncio.sleep(8)


def _verify_slowly() -> None:
    time.sleep(3600)  # where `blocks` stands


def _verify_by_pattern() -> None:
    re.match("(a*)*b", "a" * 40)  # where `locks` stands


if __name__ == "__main__":
    Steady.cli()
