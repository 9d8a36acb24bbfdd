"""In the Python that has `verifiers`: rollouts of its environments with answers from a list, as
JSON.

python verifiers_rollouts.py KIND ANSWERS TOKENIZER
"""

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "environments"))

from atroposlib.envs.base import APIServerConfig
from verifiers_environment import VerifiersEnvironment, VerifiersEnvironmentConfig


class Server:
    """Says what it is told to, and keeps what it was asked."""

    servers = [None]  # noqa: RUF012

    def __init__(self, answers, tokenizer):
        self.answers, self.tokenizer, self.asked = iter(answers), tokenizer, []

    async def tokens_and_logprobs_completion(self, *, input_ids, n, **options):
        self.asked.append(self.tokenizer.decode(input_ids))
        answer = next(self.answers)
        if answer == "!":
            raise OSError("the server is away")
        cut = answer.endswith("…")
        ids = self.tokenizer.encode(answer.removesuffix("…"), add_special_tokens=False) + (
            [] if cut else [self.tokenizer.eos_token_id]
        )
        return input_ids, [ids], [[-0.25] * len(ids)], ["length" if cut else "stop"]


async def main(kind, answers, tokenizer):
    config = VerifiersEnvironmentConfig(
        environment=str(Path(__file__).with_name("verifiers_words.py")),
        arguments={"kind": kind},
        tokenizer_name=tokenizer,
        wandb_name="test",
        use_wandb=False,
        max_token_length=4000,
    )
    env = VerifiersEnvironment(
        config, [APIServerConfig(health_check=False)], slurm=False, testing=True
    )
    await env.setup()
    env.server = Server(answers, env.tokenizer)
    item = await env.get_next_item()
    rollouts = await env.sample_rollouts(
        {**item, "prompt": [{"role": "user", "content": "reverse 12"}], "answer": "21"},
        1 if kind in ("turns", "tools") else len(answers),
    )
    return {
        "sizes": [len(env.items.train), len(env.items.held_out)],
        "asked": env.server.asked,
        "rollouts": [
            {
                "text": env.tokenizer.decode(rollout.tokens),
                "trained": env.tokenizer.decode([mask for mask in rollout.masks if mask != -100]),
                "whole": len(rollout.tokens) == len(rollout.masks) == len(rollout.logprobs),
                "reward": rollout.outcome.reward,
                "reason": rollout.outcome.reason,
                "answer": rollout.answer,
                "truncated": rollout.truncated,
            }
            for rollout in rollouts
        ],
    }


if __name__ == "__main__":
    results = asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]))
    print("\n" + json.dumps(results))
