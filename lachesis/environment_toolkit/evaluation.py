"""Sample and score the held-out items as in training, and compute the metrics of an evaluation."""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lachesis.environment_toolkit.rollout import Outcome, is_solution

if TYPE_CHECKING:
    from lachesis.environment_toolkit.dataset import Item
    from lachesis.environment_toolkit.single_turn import Rollout, TaskEnv

log = logging.getLogger(__name__)


async def evaluate_held_out(env: TaskEnv) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the metrics over all held-out items and one record per answer.

    Items whose samples fail are left out and counted as `eval/unanswered`.
    """
    semaphore = asyncio.Semaphore(max(1, env.config.max_eval_workers))

    async def sample_item(item: Item) -> list[Rollout] | None:
        async with semaphore:
            try:
                return await env.sample_rollouts(item, env.config.eval_samples, split="eval")
            except Exception as error:
                log.warning("a held-out item was not answered", exc_info=error)
                return None

    rollouts_P = await asyncio.gather(*(sample_item(item) for item in env.items.held_out))
    answered = [
        (item, rollouts)
        for item, rollouts in zip(env.items.held_out, rollouts_P, strict=True)
        if rollouts is not None
    ]
    metrics = compute_held_out_metrics(
        [[rollout.outcome for rollout in rollouts] for _, rollouts in answered], env.solved
    )
    metrics["eval/unanswered"] = float(len(rollouts_P) - len(answered))
    return metrics, [
        _build_sample_record(item, rollout) for item, rollouts in answered for rollout in rollouts
    ]


def compute_held_out_metrics(
    outcomes_P: Sequence[Sequence[Outcome]], solved: float
) -> dict[str, float]:
    """Compute the metrics of an evaluation from the outcomes of each item's answers.

    eval/percent_correct   share of the valid answers whose reward is at least `solved`
    eval/pass@k            share of items that at least one of k answers solves; unbiased, from
                           n >= k valid answers with c solutions: 1 - C(n-c, k) / C(n, k)
                           (Chen et al. 2021, arXiv:2107.03374, eq. 1)
    eval/reward, eval/NAME mean reward, and mean of each of its parts
    eval/items             items with an answer that could be scored
    eval/invalid           share of answers that could not be scored
    """
    all_outcomes = [outcome for outcomes in outcomes_P for outcome in outcomes]
    metrics = {
        f"eval/{name}": value for name, value in summarize_outcomes(all_outcomes, solved).items()
    }
    valid_and_solved = [_count_solutions(outcomes, solved) for outcomes in outcomes_P]
    valid_and_solved = [(n, c) for n, c in valid_and_solved if n > 0]
    metrics["eval/items"] = float(len(valid_and_solved))
    for k in sorted({1, min((n for n, _ in valid_and_solved), default=1)}):
        if valid_and_solved:
            metrics[f"eval/pass@{k}"] = statistics.fmean(
                1 - math.comb(n - c, k) / math.comb(n, k) for n, c in valid_and_solved
            )
    return metrics


def summarize_outcomes(outcomes: Sequence[Outcome], solved: float) -> dict[str, float]:
    """Return the metrics `percent_correct`, `reward`, one for each part of the reward, and
    `invalid`.

    If no outcome has a reward, only `invalid` is returned.
    """
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    metrics: dict[str, float] = {}
    if rewards:
        metrics = {
            "percent_correct": statistics.fmean(is_solution(reward, solved) for reward in rewards),
            "reward": statistics.fmean(rewards),
        }
    parts: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.parts.items():
            parts.setdefault(name, []).append(value)
    metrics |= {
        name: statistics.fmean(values) for name, values in parts.items() if name not in metrics
    }
    if outcomes:
        metrics["invalid"] = 1 - len(rewards) / len(outcomes)
    return metrics


def _count_solutions(outcomes: Sequence[Outcome], solved: float) -> tuple[int, int]:
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    return len(rewards), sum(is_solution(reward, solved) for reward in rewards)


def _build_sample_record(item: Item, rollout: Rollout) -> dict[str, Any]:
    """Return a held-out item with its answer, score and reason."""
    outcome = rollout.outcome
    return {
        **item,
        "model_answer": rollout.answer,
        "score": outcome.reward,
        "parts": outcome.parts,
        "reason": outcome.reason,
    }
