"""The groups of `replay`, and evaluations that last for several training steps, each of the kind
that `kinds` names.

It asks the model the same question again and again. `eval/apart` is how far the log-probabilities
of the answers are apart: 0 when they all came from the same weights. An evaluation lasts for three
steps, and groups are held back before the next one is due, however slow the machine is.
"""

import asyncio
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

PLACE = importlib.util.spec_from_file_location("replay", Path(__file__).with_name("replay.py"))
assert PLACE is not None and PLACE.loader is not None  # noqa: PT018
replay = importlib.util.module_from_spec(PLACE)
PLACE.loader.exec_module(replay)
ITEMS = 3
# The run has this in `steps_per_eval`, which Lachesis takes out of the environment's own hands.
EVERY = 8


class GradedConfig(BaseEnvConfig):
    kinds: str = "sound raises returns sound"


class Graded(replay.Replay):  # type: ignore[misc, name-defined]
    """Replayed groups with an evaluation."""

    name = "graded"
    env_config_cls = GradedConfig

    @classmethod
    def config_init(cls) -> Any:
        return GradedConfig(wandb_name="graded"), [APIServerConfig(server_type="vllm")]

    async def setup(self) -> None:
        await super().setup()
        self.kinds = self.config.kinds.split()
        self.ended = 0

    async def collect_trajectories(self, item: int) -> Any:
        await self.wait_while(lambda step: step > self.step_evaluated + ITEMS)
        return await super().collect_trajectories(item)

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await self.grade(self.kinds.pop(0))
        finally:
            self.ended += 1

    async def grade(self, kind: str) -> Any:
        if kind == "raises":
            raise ValueError("no held-out items")
        logprobs: list[float] = []
        for item in range(ITEMS):
            logprobs += await self.ask([20, 21, 22])
            await self.ask([30, 31, item])
            until = min(self.step_evaluated + item + 1, self.config.total_steps - 1)
            await self.wait_while(lambda step, until=until: step < until)
        metrics = {
            "eval/percent_correct": 0.5,
            "eval/logprob": logprobs[0],
            "eval/apart": max(logprobs) - min(logprobs),
        }
        if kind == "returns":
            return {"quality": 2.5, "apart": metrics["eval/apart"], "logprob": logprobs[0]}
        await self.evaluate_log(metrics, samples=[])
        return None

    async def ask(self, ids: list[int]) -> list[float]:
        _, _, logprobs, _ = await self.server.tokens_and_logprobs_completion(
            prompt="", input_ids=ids, n=1, max_tokens=1, temperature=0.0, split="eval"
        )
        return [logprob[0] for logprob in logprobs]

    @property
    def step_evaluated(self) -> int:
        """Return the step of the evaluation that runs or is due next."""
        return self.ended * EVERY

    async def wait_while(self, is_early: Callable[[int], bool]) -> None:
        """Wait as long as `is_early` returns true for the current step."""
        until = time.monotonic() + 60
        while is_early(self.status_dict["current_step"]):
            assert time.monotonic() < until
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    Graded.cli()
