"""What the numbers of a run say about learning."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lachesis.monitor.learning import WINDOW, best_reward, judge

Step = dict[str, Any]


def healthy(count: int = 60, seed: int = 0, **fixed: Any) -> list[Step]:
    """A run whose reward rises from 0.2 to 0.8."""
    rng = random.Random(seed)
    return [
        {
            "step": number,
            "reward/mean": 0.2 + 0.6 * number / count + rng.uniform(-0.08, 0.08),
            "batch/zero_signal_share": rng.choice([0.0, 0.0, 0.125, 0.25]),
            "batch/rollouts": 128,
            "rollouts/invalid": 0,
            "train/loss": rng.uniform(-0.01, 0.01),
            "logprobs/gap": rng.uniform(0.0, 0.08),
            "entropy/sampling": 1.0 - 0.8 * number / count,
            "length/mean": 2.5,
            "rollouts/truncated_share": 0.0,
            "weights/change": rng.uniform(0.02, 0.2),
            **fixed,
        }
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_learns_is_healthy_at_every_step(seed: int) -> None:
    steps = healthy(300, seed)
    assert {judge(steps[:end]).word for end in range(1, 301)} == {"healthy"}


def test_a_solved_task_is_no_fault() -> None:
    solved = {"reward/mean": 1.0, "batch/zero_signal_share": 1.0, "entropy/sampling": 0.0, "weights/change": None}
    assert judge(healthy(100) + [{**step, **solved, "step": 100 + step["step"]} for step in healthy(60)]).word == "healthy"


@pytest.mark.parametrize(
    ("fault", "word", "said"),
    [
        ({"weights/change": 0.0}, "broken", "the sampled weights have not changed in the last 20 updates"),
        ({"train/loss": None}, "broken", "the loss was not a finite number in 5 of the last 5 steps"),
        ({"batch/zero_signal_share": 1.0, "reward/mean": 0.0}, "broken", "100% of the groups of the last 20 steps"),
        ({"batch/zero_signal_share": 0.95, "reward/mean": 0.1}, "suspect", "hardly any gradient"),
        ({"logprobs/gap": 1.7}, "broken", "differ by 1.70 nats per token"),
        ({"logprobs/gap": 0.4}, "suspect", "differ by 0.40 nats per token"),
        ({"rollouts/invalid": 1024}, "broken", "89% of the rollouts of the last 20 steps had no usable score"),
        ({"rollouts/invalid": 64}, "suspect", "33% of the rollouts of the last 20 steps had no usable score"),
        ({"environments/b/reward_mean": 0.0}, "suspect", "no rollout of b was worth more than 0 in the last 20 steps"),
        ({"reward/mean": 0.05}, "suspect", "the mean reward fell from"),
        ({"entropy/sampling": 0.001, "reward/mean": 0.1}, "suspect", "it tries nothing new"),
        ({"length/mean": 60.0}, "suspect", "completions went from"),
        ({"rollouts/truncated_share": 0.7}, "suspect", "70% of the completions are cut off"),
    ],
)  # fmt: skip
def test_each_fault_is_named_within_twenty_steps(fault: Step, word: str, said: str) -> None:
    before = healthy(60)
    ill = [{**step, **fault, "step": 60 + step["step"]} for step in healthy(WINDOW, 1)]
    found = judge(before + ill)
    assert found.word == word
    assert any(said in sentence for sentence in found.evidence), found.evidence
    assert len(found.advice) == len(found.evidence)


def test_the_gravest_comes_first() -> None:
    found = judge(healthy(60, **{"rollouts/truncated_share": 0.9, "weights/change": 0.0}))
    assert found.word == "broken"
    assert "weights" in found.evidence[0]
    assert "cut off" in found.evidence[1]


def test_a_few_steps_are_too_few() -> None:
    assert judge(healthy(60, **{"weights/change": 0.0})[:4]).evidence == ["not judged yet: 4 of at least 5 steps"]


def test_slow_changes_are_seen_against_the_start_and_the_best() -> None:
    """A tick reads only the last sixty steps of a long run."""
    slow = healthy(600, **{"reward/mean": None})
    for step in slow:
        step["reward/mean"] = 0.8 - 0.4 * step["step"] / 600
        step["length/mean"] = 2.0 + 6.0 * step["step"] / 600
    best = best_reward(slow[:60])
    found = judge(slow[-60:], first=slow[:20], best=best)
    assert found.word == "suspect"
    assert "the mean reward fell from 0.79" in " ".join(found.evidence)
    assert "completions went from 2 to 8 tokens" in " ".join(found.evidence)


def test_a_task_whose_best_reward_is_small_can_be_solved() -> None:
    """No gradient is left and the reward has risen: worth a look, and no fault."""
    solved = {"reward/mean": 0.5, "batch/zero_signal_share": 1.0}
    course = healthy(40, **{"reward/mean": 0.1}) + healthy(30, **solved)
    assert judge(course[-60:], first=course[:20]).word == "suspect"
