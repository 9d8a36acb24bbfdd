"""Measure how often the monitor's judgement of learning is right.

Runs of five kinds are simulated, and judged repeatedly as the monitor does. A simulated run has
groups of rollouts with rewards 0 or 1. Each prompt has its own difficulty, and the policy's level
drifts slowly, so the noise of successive steps is correlated. The table shows, for each kind, the
share of runs that were ever given each judgement, and when.
"""

import argparse
import collections
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lachesis.monitor.learning_rules import judge_learning
from lachesis.monitor.reward_trend import WINDOW, Trend
from lachesis.monitor.run_history import SEVERITY, RunFacts

Step = dict[str, Any]
Array = np.ndarray[Any, Any]
LOOKS = 100
"""Times that a run is judged, evenly spread, as by a tick a minute in a run of 100 minutes."""
LENGTHS = (100, 200, 300, 500, 1000, 2500)
BATCHES = ((32, 8), (64, 8), (128, 16), (256, 16), (512, 16))
"""Rollouts per step and per group."""
WANDERS = (0.0, 0.02, 0.04)
"""Standard deviation of the slow noise of the mean reward."""
PERSISTENCE = (0.0, 0.4, 0.8)
"""Correlation of that noise from one step to the next."""
SPREADS = (0.5, 1.0, 2.0)
"""Standard deviation of the prompts' difficulty, in logits."""


@dataclass(frozen=True)
class Curve:
    """The expected reward of each step, and the step at which the kind's event happens: the
    take-off, or the collapse.
    """

    level: Array
    event: int


def rising(rng: np.random.Generator, steps: int) -> Curve:
    """Rise by 0.2 to 0.6, in a line or with a falling slope."""
    start, gain = rng.uniform(0.05, 0.4), rng.uniform(0.2, 0.6)
    done = np.arange(steps) / steps
    pace = rng.uniform(1.0, 8.0)
    shape = done if rng.random() < 0.5 else (1 - np.exp(-pace * done)) / (1 - math.exp(-pace))
    return Curve(start + gain * shape, 0)


def flat(rng: np.random.Generator, steps: int) -> Curve:
    """Stay at one level between 0.05 and 0.8."""
    return Curve(np.full(steps, rng.uniform(0.05, 0.8)), 0)


def late(rng: np.random.Generator, steps: int) -> Curve:
    """Stay at a low level for 15 to 70 % of the run, then rise within a fifth of it."""
    start, top = rng.uniform(0.002, 0.15), rng.uniform(0.5, 0.95)
    begin, width = rng.uniform(0.15, 0.7) * steps, 0.2 * steps
    return Curve(
        start + (top - start) * np.clip((np.arange(steps) - begin) / width, 0, 1), int(begin)
    )


def solved(rng: np.random.Generator, steps: int) -> Curve:
    """Have learned the task before the first step."""
    return Curve(np.full(steps, rng.uniform(0.94, 0.999)), 0)


def collapsing(rng: np.random.Generator, steps: int) -> Curve:
    """Rise until 30 to 60 % of the run, then fall to nearly nothing within a tenth of it."""
    start, top = rng.uniform(0.1, 0.4), rng.uniform(0.5, 0.9)
    turn, done = rng.uniform(0.3, 0.6), np.arange(steps) / steps
    up = start + (top - start) * np.clip(done / turn, 0, 1)
    down = np.clip((done - turn) / 0.1, 0, 1)
    return Curve(up * (1 - down) + rng.uniform(0.0, 0.05) * down, int(turn * steps))


KINDS: dict[str, Callable[[np.random.Generator, int], Curve]] = {
    "rising": rising,
    "late take-off": late,
    "solved": solved,
    "flat": flat,
    "collapsing": collapsing,
}
HEALTHY = ("rising", "late take-off", "solved")


def make_steps(rng: np.random.Generator, curve: Curve) -> list[Step]:
    """Sample the metrics of a run along the curve."""
    steps = len(curve.level)
    batch, group = BATCHES[rng.integers(len(BATCHES))]
    wander, persistence = rng.choice(WANDERS), rng.choice(PERSISTENCE)
    noise, shocks = np.zeros(steps), rng.normal(0, wander * math.sqrt(1 - persistence**2), steps)
    for at in range(steps):
        noise[at] = (persistence * noise[at - 1] if at else 0.0) + shocks[at]
    level = np.clip(
        curve.level + noise * np.minimum(1, 4 * curve.level * (1 - curve.level) + 0.05),
        1e-4,
        1 - 1e-4,
    )
    spread = rng.choice(SPREADS)
    # wider difficulties pull the mean towards a half; the usual approximation undoes it
    logits = np.log(level / (1 - level)) * math.sqrt(1 + math.pi * spread**2 / 8)
    chances = 1 / (1 + np.exp(-(logits[:, None] + rng.normal(0, spread, (steps, batch // group)))))
    right = rng.binomial(group, chances)
    silent = np.mean((right == 0) | (right == group), axis=1)
    rewards = right.mean(axis=1) / group
    return [
        {
            "step": at + 1,
            "reward/mean": float(rewards[at]),
            "batch/zero_signal_share": float(silent[at]),
            "batch/rollouts": batch,
            "rollouts/invalid": 0.0,
            "train/loss": 0.0,
            "train/learning_rate": 4e-5,
            **({"weights/change": 1e-3} if silent[at] < 1 else {}),
        }
        for at in range(steps)
    ]


def looks(steps: list[Step]) -> Iterator[tuple[int, str, str]]:
    """Judge a run as the monitor does; yield the step, the word and the first evidence of each
    look.
    """
    trend, facts, seen = Trend(), RunFacts(total_steps=len(steps)), 0
    for look in range(1, LOOKS + 1):
        end = round(look * len(steps) / LOOKS)
        trend.add(steps[seen:end])
        trend, seen = (
            Trend.model_validate_json(trend.model_dump_json()) if look % 10 == 0 else trend,
            end,
        )
        health = judge_learning(
            steps[max(0, end - 60) : end],
            first_steps=steps[: min(WINDOW, end)],
            trend=trend,
            facts=facts,
        )
        yield end, health.word, health.evidence[0]


@dataclass
class Tally:
    """What the runs of one kind were called."""

    runs: int = 0
    ever: collections.Counter[str] | None = None
    worse: int = 0
    """Runs that were ever called something worse than `suspect`."""
    missing_by_half: int = 0
    """Runs that were called `not learning` before their half."""
    missing_before: int = 0
    """Runs that were called `not learning` before their event, such as the take-off."""
    missing_after: int = 0
    """Runs that were called so later than an event and a fifth of the run."""
    missing_at_end: int = 0
    too_soon: int = 0
    """Runs that were called so within their first tenth."""
    delays: list[float] | None = None
    """Shares of the run between the event and the first word that is not `healthy`."""


def simulate(kind: str, runs: int, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Tally:
    """Judge so many runs of a kind."""
    tally = Tally(ever=collections.Counter(), delays=[])
    assert tally.ever is not None
    assert tally.delays is not None
    for number in range(runs):
        rng = np.random.default_rng([seed, list(KINDS).index(kind), number])
        total = lengths[number % len(lengths)]
        curve = KINDS[kind](rng, total)
        words = [(end, word) for end, word, _ in looks(make_steps(rng, curve))]
        missing = [end for end, word in words if word == "not learning"]
        tally.runs += 1
        tally.ever.update({word for _, word in words})
        tally.worse += any(SEVERITY[word] > SEVERITY["suspect"] for _, word in words)
        tally.missing_by_half += any(end < total / 2 for end in missing)
        tally.missing_before += any(end <= curve.event for end in missing)
        tally.missing_after += any(end > curve.event + total / 5 for end in missing)
        tally.missing_at_end += words[-1][1] == "not learning"
        tally.too_soon += any(end <= total / 10 for end in missing)
        alarms = [
            end
            for end, word in words
            if end > curve.event and word not in ("healthy", "not learning")
        ]
        tally.delays.append((alarms[0] - curve.event) / total if alarms else math.inf)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="per kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from table import show

    columns = [
        "kind",
        "worse than suspect",
        "suspect",
        "not learning",
        "… before half",
        "… before take-off",
        "… long after it",
        "… at the end",
        "… in first tenth",
        "median delay of alarm",
    ]
    rows: list[list[object]] = []
    failed = False
    for kind in KINDS:
        tally = simulate(kind, args.runs, args.seed)
        assert tally.ever is not None
        assert tally.delays is not None
        counts = (tally.worse, tally.ever["suspect"], tally.ever["not learning"],
            tally.missing_by_half, tally.missing_before,
                  tally.missing_after, tally.missing_at_end, tally.too_soon)  # fmt: skip
        delay = (
            f"{sorted(tally.delays)[args.runs // 2]:.1%} of the run" if kind == "collapsing" else ""
        )
        rows.append([kind, *(f"{count / args.runs:.1%}" for count in counts), delay])
        failed |= kind in HEALTHY and tally.worse > 0.02 * args.runs
        failed |= kind == "flat" and tally.missing_by_half < 0.95 * args.runs
    show(
        f"judgement of {args.runs} simulated runs per kind, each looked at {LOOKS} times",
        columns,
        rows,
    )
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
