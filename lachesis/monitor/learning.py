"""Whether a run learns: healthy, suspect or broken, with the numbers that say so and what to do. Pure functions on its metrics.

A process that lives may learn nothing. A word is advice and stops nothing by itself. `broken` needs a sign that no healthy run
shows: weights that do not change, no gradient at all for many steps without reward, a loss that is no number, sampling and
training that disagree grossly, rollouts that nearly all fail.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Step = dict[str, Any]
Word = Literal["healthy", "suspect", "broken"]
LEAST_STEPS = 5
WINDOW = 20
"""The judgement is about this many last steps."""
UNCHANGED = 1e-7
"""Nats per token; the same weights give the same log-probabilities up to rounding."""
SOLVED = 0.9
RISEN = 0.1
GAP_SUSPECT, GAP_BROKEN = 0.25, 1.0
"""Mean absolute difference of sampling and training log-probabilities in nats per token. At 1 the ratio of the
importance-sampling loss is off by a factor of e for a typical token."""


class Finding(BaseModel):
    word: Word
    evidence: str
    advice: str


class Health(BaseModel):
    """`evidence` and `advice` belong together, the gravest first."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    word: Word
    evidence: list[str]
    advice: list[str] = []


@dataclass(frozen=True)
class Course:
    """A run until now: its last steps, its first ones, and the best mean reward that a window of it ever had."""

    last: Sequence[Step]
    first: Sequence[Step]
    best: float | None


def judge(steps: Sequence[Step], *, first: Sequence[Step] | None = None, best: float | None = None) -> Health:
    """What the last steps say; `steps` are lines of the metrics in order, at least the last WINDOW. Of a longer run `first` are
    the first WINDOW steps and `best` what `best_reward` said until now."""
    if len(steps) < LEAST_STEPS:
        return Health(word="healthy", evidence=[f"not judged yet: {len(steps)} of at least {LEAST_STEPS} steps"])
    course = Course(steps, first or steps[:WINDOW], best_reward(steps, best))
    found = [finding for sign in SIGNS if (finding := sign(course)) is not None]
    found.sort(key=lambda one: one.word != "broken")
    if not found:
        return Health(word="healthy", evidence=[_summary(steps)])
    word: Word = "broken" if found[0].word == "broken" else "suspect"
    return Health(word=word, evidence=[one.evidence for one in found], advice=[one.advice for one in found])


def best_reward(steps: Sequence[Step], known: float | None = None) -> float | None:
    """The highest mean reward of a window of these steps, or `known` if that is higher; None without a whole window."""
    rewards = [one["reward/mean"] for one in steps if one.get("reward/mean") is not None]
    starts = range(0, len(rewards) - WINDOW + 1, WINDOW // 2)
    return max(
        [statistics.fmean(rewards[one : one + WINDOW]) for one in starts] + ([] if known is None else [known]), default=None
    )


def _values(steps: Sequence[Step], key: str, count: int = WINDOW) -> list[float]:
    return [one[key] for one in steps[-count:] if one.get(key) is not None]


def _mean(steps: Sequence[Step], key: str, count: int = WINDOW) -> float | None:
    values = _values(steps, key, count)
    return statistics.fmean(values) if values else None


def _summary(steps: Sequence[Step]) -> str:
    reward, silent = _mean(steps, "reward/mean"), _mean(steps, "batch/zero_signal_share")
    parts = [f"mean reward {reward:.3f} over the last {min(WINDOW, len(steps))} steps"] if reward is not None else []
    return (
        ", ".join([*parts, *([f"{silent:.0%} of groups without a signal"] if silent is not None else [])]) or "nothing unusual"
    )


def weights_stay(course: Course) -> Finding | None:
    changes = _values(course.last, "weights/change")
    still = 0
    for change in reversed(changes):
        if change > UNCHANGED:
            break
        still += 1
    if still < LEAST_STEPS:
        return None
    return Finding(
        word="broken",
        evidence=f"the sampled weights have not changed in the last {still} updates",
        advice="stop: the run trains nothing; look at the trainer's and the server's logs, and at the learning rate",
    )


def loss_is_no_number(course: Course) -> Finding | None:
    last = course.last[-LEAST_STEPS:]
    bad = sum("train/loss" in one and one["train/loss"] is None for one in last)
    if bad < 2:
        return None
    return Finding(
        word="broken",
        evidence=f"the loss was not a finite number in {bad} of the last {len(last)} steps",
        advice="stop and resume from a checkpoint before it, with a lower learning_rate",
    )


def no_signal(course: Course) -> Finding | None:
    """A run whose reward has risen has perhaps learned all that its environment pays for, which may be less than 1."""
    silent, reward = _values(course.last, "batch/zero_signal_share"), _mean(course.last, "reward/mean") or 0.0
    risen = reward - (_mean(course.first, "reward/mean") or 0.0) > RISEN
    if len(silent) < WINDOW or reward >= SOLVED or statistics.fmean(silent) < 0.9:
        return None
    none_at_all = min(silent) == 1.0 and not risen
    return Finding(
        word="broken" if none_at_all else "suspect",
        evidence=f"{statistics.fmean(silent):.0%} of the groups of the last {WINDOW} steps had equal rewards, at mean "
        f"{reward:.3f}: {'no' if min(silent) == 1.0 else 'hardly any'} gradient",
        advice="easier items, a stronger model or a larger group_size; see the inference test",
    )


def sampler_and_trainer_disagree(course: Course) -> Finding | None:
    gap = _mean(course.last, "logprobs/gap", 10)
    if gap is None or gap < GAP_SUSPECT:
        return None
    return Finding(
        word="broken" if gap >= GAP_BROKEN else "suspect",
        evidence=f"sampling and training log-probabilities differ by {gap:.2f} nats per token",
        advice="fewer stale batches (max_batches_offpolicy), a lower learning_rate, or a clipped loss (loss_fn ppo)",
    )


def rollouts_fail(course: Course) -> Finding | None:
    invalid = sum(_values(course.last, "rollouts/invalid"))
    good = sum(_values(course.last, "batch/rollouts"))
    share = invalid / (invalid + good) if invalid + good else 0.0
    if share < 0.2:
        return None
    return Finding(
        word="broken" if share >= 0.8 else "suspect",
        evidence=f"{share:.0%} of the rollouts of the last {min(WINDOW, len(course.last))} steps had no usable score",
        advice="read the environment's log: it raises, or scores are no numbers",
    )


def one_has_no_reward(course: Course) -> Finding | None:
    """Of several environments."""
    keys = {key for one in course.last[-1:] for key in one if key.startswith("environments/") and key.endswith("/reward_mean")}
    rewards = {key.split("/")[1]: _values(course.last, key) for key in sorted(keys)}
    silent = [name for name, values in rewards.items() if len(values) >= WINDOW and not any(values)]
    if not silent:
        return None
    return Finding(
        word="suspect",
        evidence=f"no rollout of {', '.join(silent)} was worth more than 0 in the last {WINDOW} steps",
        advice="a model that can do a little of each task: see the inference test of each environment",
    )


def reward_falls(course: Course) -> Finding | None:
    rewards, best = _values(course.last, "reward/mean"), course.best
    if best is None or len(rewards) < WINDOW:
        return None
    now, noise = statistics.fmean(rewards), statistics.pstdev(rewards) / WINDOW**0.5
    if best - now <= max(0.1 * (abs(best) or 1.0), 4 * noise):
        return None
    return Finding(
        word="suspect",
        evidence=f"the mean reward fell from {best:.3f} to {now:.3f}",
        advice="stop and resume from a checkpoint of the better time, with a lower learning_rate",
    )


def entropy_is_gone(course: Course) -> Finding | None:
    entropy, reward = _mean(course.last, "entropy/sampling", 10), _mean(course.last, "reward/mean", 10)
    if entropy is None or reward is None or entropy >= 0.01 or reward >= 0.5:
        return None
    return Finding(
        word="suspect",
        evidence=f"the policy's entropy is {entropy:.4f} nats per token at a mean reward of {reward:.3f}: it tries nothing new",
        advice="resume from an earlier checkpoint with a lower learning_rate",
    )


def length_drifts(course: Course) -> Finding | None:
    first, last = _mean(course.first, "length/mean"), _mean(course.last, "length/mean")
    if len(course.last) < 2 * WINDOW or not first or not last or first / 3 < last < 3 * first:
        return None
    return Finding(
        word="suspect",
        evidence=f"completions went from {first:.0f} to {last:.0f} tokens",
        advice="read sampled rollouts: a reward that favours length, or shortness, is being used",
    )


def cut_off(course: Course) -> Finding | None:
    share = _mean(course.last, "rollouts/truncated_share", 5)
    if share is None or share < 0.5:
        return None
    return Finding(
        word="suspect",
        evidence=f"{share:.0%} of the completions are cut off at their limit of tokens",
        advice="raise the limit of tokens of an answer, or ask for shorter ones",
    )


SIGNS: tuple[Callable[[Course], Finding | None], ...] = (
    weights_stay,
    loss_is_no_number,
    no_signal,
    sampler_and_trainer_disagree,
    rollouts_fail,
    one_has_no_reward,
    reward_falls,
    entropy_is_gone,
    length_drifts,
    cut_off,
)
