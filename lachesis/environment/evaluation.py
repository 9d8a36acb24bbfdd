"""The held-out items, asked and scored as in training, and what that says in numbers."""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lachesis.environment.outcome import Outcome, solves

if TYPE_CHECKING:
    from lachesis.environment.data import Item
    from lachesis.environment.task import Rollout, TaskEnv

log = logging.getLogger(__name__)


async def evaluate(env: TaskEnv) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics over all held-out items, and one line per answer. An item that the server does not answer is left out, and
    counted."""
    at_once = asyncio.Semaphore(max(1, env.config.max_eval_workers))

    async def one(item: Item) -> list[Rollout] | None:
        async with at_once:
            try:
                return await env.rollouts(item, env.config.eval_samples, split="eval")
            except Exception as error:
                log.warning("a held-out item was not answered", exc_info=error)
                return None

    found = await asyncio.gather(*(one(item) for item in env.items.held_out))
    answered = [(item, rollouts) for item, rollouts in zip(env.items.held_out, found, strict=True) if rollouts is not None]
    metrics = measures([[one.outcome for one in rollouts] for _, rollouts in answered], env.solved)
    metrics["eval/unanswered"] = float(len(found) - len(answered))
    return metrics, [_line(item, rollout) for item, rollouts in answered for rollout in rollouts]


def measures(outcomes_P: Sequence[Sequence[Outcome]], solved: float) -> dict[str, float]:
    """Of the outcomes of each item's answers:

    eval/percent_correct   share of the valid answers whose reward is at least `solved`
    eval/pass@k            share of items that at least one of k answers solves; unbiased, from n >= k valid answers with c
                           solutions: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1)
    eval/reward, eval/NAME mean reward, and mean of each of its parts
    eval/items             items with an answer that could be scored
    eval/invalid           share of answers that could not be scored
    """
    every = [one for outcomes in outcomes_P for one in outcomes]
    found = {f"eval/{name}": value for name, value in shares(every, solved).items()}
    counts = [_solutions(outcomes, solved) for outcomes in outcomes_P]
    counts = [(n, c) for n, c in counts if n > 0]
    found["eval/items"] = float(len(counts))
    for k in sorted({1, min((n for n, _ in counts), default=1)}):
        if counts:
            found[f"eval/pass@{k}"] = statistics.fmean(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts)
    return found


def shares(outcomes: Sequence[Outcome], solved: float) -> dict[str, float]:
    """`percent_correct`, `reward`, one number per part, and `invalid`; without the first three when nothing was scored."""
    rewards = [one.reward for one in outcomes if one.reward is not None]
    found: dict[str, float] = {}
    if rewards:
        found = {
            "percent_correct": statistics.fmean(solves(one, solved) for one in rewards),
            "reward": statistics.fmean(rewards),
        }
    parts: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.parts.items():
            parts.setdefault(name, []).append(value)
    found |= {name: statistics.fmean(values) for name, values in parts.items() if name not in found}
    if outcomes:
        found["invalid"] = 1 - len(rewards) / len(outcomes)
    return found


def _solutions(outcomes: Sequence[Outcome], solved: float) -> tuple[int, int]:
    rewards = [one.reward for one in outcomes if one.reward is not None]
    return len(rewards), sum(solves(one, solved) for one in rewards)


def _line(item: Item, rollout: Rollout) -> dict[str, Any]:
    outcome = rollout.outcome
    return {**item, "model_answer": rollout.answer, "score": outcome.reward, "parts": outcome.parts, "reason": outcome.reason}
