"""Detect updates that do not reach the weights, or that damage them."""

import itertools
from collections.abc import Sequence

from lachesis.monitor.reward_trend import WINDOW
from lachesis.monitor.run_history import (
    MIN_JUDGED_STEPS,
    AdvisedEdit,
    Finding,
    RunHistory,
    Step,
    compute_recent_mean,
)
from lachesis.weight_agreement.logprob_gap import BROKEN_LOGPROB_GAP, SUSPECT_LOGPROB_GAP

# Learning rate below which rounding may hide what an update changes.
MIN_LEARNING_RATE = 1e-6
# Share of the run's highest learning rate below which an update is not judged: the start of a
# warm-up and the end of a schedule.
MIN_SHARE_OF_PEAK_RATE = 0.01


def find_unchanged_weights(history: RunHistory) -> Finding | None:
    """Find updates that did not change the weights although their learning rate was high enough."""
    min_rate = max(MIN_LEARNING_RATE, MIN_SHARE_OF_PEAK_RATE * history.trend.peak_rate)
    num_unchanged = 0
    for change, rate in reversed(_collect_weight_changes(history.last_steps, min_rate)):
        if change > max(MAX_UNCHANGED_NATS, MAX_UNCHANGED_NATS_PER_RATE * rate):
            break
        num_unchanged += 1
    if num_unchanged < MIN_JUDGED_STEPS:
        return None
    return Finding(
        word="broken",
        evidence=f"the sampled weights have not changed in the last {num_unchanged} updates, "
        f"although the learning rate was at least {min_rate:.2g}",
        advice=f"{history.facts.format_stop_prefix()}look in "
        f"{history.facts.format_logs_command('trainer')} for what the server answered to the "
        f"updates",
    )


def _collect_weight_changes(steps: Sequence[Step], min_rate: float) -> list[tuple[float, float]]:
    """Return the weight changes of updates with a learning rate of at least `min_rate`, with that
    rate.

    A line of the metrics may contain the change made by the update of the previous line, so the
    lower of the two rates is used.
    """
    changes = []
    for previous_step, step in itertools.pairwise([{}, *steps]):
        rate, change = step.get("train/learning_rate"), step.get("weights/change")
        if rate is None or change is None:
            continue
        rate_before = previous_step.get("train/learning_rate")
        lower_rate = rate if rate_before is None else min(rate, rate_before)
        if lower_rate >= min_rate:
            changes.append((change, lower_rate))
    return changes[-WINDOW:]


def find_non_finite_loss(history: RunHistory) -> Finding | None:
    """Find a loss that is NaN or infinite."""
    last_steps = history.last_steps[-MIN_JUDGED_STEPS:]
    bad_steps = [
        step["step"] for step in last_steps if "train/loss" in step and step["train/loss"] is None
    ]
    if len(bad_steps) < 2:
        return None
    return Finding(
        word="broken",
        evidence=f"the loss was not a finite number in {len(bad_steps)} of the last "
        f"{len(last_steps)} steps",
        advice=history.advise_return(_find_step_before_bad_loss(history)),
    )


def find_logprob_gap(history: RunHistory) -> Finding | None:
    """Find log-probabilities that differ between sampling and training."""
    gap = compute_recent_mean(history.last_steps, "logprobs/gap", 10)
    if gap is None or gap < SUSPECT_LOGPROB_GAP:
        return None
    facts = history.facts
    edits = [
        AdvisedEdit("max_batches_offpolicy", "1", "fresher rollouts"),
        AdvisedEdit("loss_fn", "ppo", "a clipped loss"),
    ]
    if not facts.select_effective_edits(edits):
        edits += facts.list_rate_edits()
    last_good_step = history.find_last_good_step(
        "logprobs/gap", lambda value: value < SUSPECT_LOGPROB_GAP
    )
    advice = facts.advise_training(*edits, start_from=facts.find_checkpoint_before(last_good_step))
    return Finding(
        word="broken" if gap >= BROKEN_LOGPROB_GAP else "suspect",
        evidence=f"sampling and training log-probabilities differ by {gap:.2f} nats per token",
        advice=f"{history.facts.format_stop_prefix()}{advice}",
    )


def _find_step_before_bad_loss(history: RunHistory) -> int | None:
    """Return the last step before the first loss that is known not to be a number."""
    good_step = None
    for step in (*history.first_steps, *history.last_steps):
        if "train/loss" in step:
            if step["train/loss"] is None:
                return good_step
            good_step = int(step["step"])
    return good_step


# Nats per token: identical weights give identical log-probabilities up to rounding; the second
# limit is per unit of the learning rate. An update of the embedded engine's tiny model changes a
# token by about 6 nats per unit, at every rate from 1e-7 to 1e-3.
MAX_UNCHANGED_NATS, MAX_UNCHANGED_NATS_PER_RATE = 1e-7, 1e-3
