"""Compute the first and the last reward of a run, each the mean of some steps."""

from __future__ import annotations

from lachesis.runs.metrics import Step

# Maximum number of steps that the first and the last reward of a run are averaged over, because one
# step has few prompts.
REWARD_STEPS = 5


def count_reward_steps(num_steps: int) -> int:
    """Return how many steps the first and the last mean reward of a run are averaged over."""
    return max(1, min(REWARD_STEPS, num_steps // 2))  # No step is in both.


def compute_mean_reward(steps: list[Step]) -> float | None:
    """Return the mean of the steps' mean rewards with four decimals, or None if there is none."""
    rewards = [step["reward/mean"] for step in steps if step.get("reward/mean") is not None]
    if not rewards:
        return None
    return round(float(sum(rewards)) / len(rewards), 4)
