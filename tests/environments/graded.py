"""The groups of `replay`, and evaluations that last for several training steps, each of the kind
that `kinds` names.

It asks the model the same question again and again. `eval/apart` is how far the log-probabilities
of the answers are apart: 0 when they all came from the same weights.
"""

import asyncio
import importlib.util
import time
from pathlib import Path
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

PLACE = importlib.util.spec_from_file_location("replay", Path(__file__).with_name("replay.py"))
assert PLACE is not None and PLACE.loader is not None  # noqa: PT018
replay = importlib.util.module_from_spec(PLACE)
PLACE.loader.exec_module(replay)
ITEMS, STEPS = 3, 2


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

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        kind = self.kinds.pop(0)
        if kind == "raises":
            raise ValueError("no held-out items")
        logprobs: list[float] = []
        for item in range(ITEMS):
            logprobs += await self.ask([20, 21, 22])
            await self.ask([30, 31, item])
            await self.later()
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

    async def later(self) -> None:
        """Wait for some training steps, unless the run has come to its end."""
        begun, until = self.status_dict["current_step"], time.monotonic() + 10
        while self.status_dict["current_step"] < min(begun + STEPS, self.config.total_steps - 1):
            assert time.monotonic() < until
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    Graded.cli()
