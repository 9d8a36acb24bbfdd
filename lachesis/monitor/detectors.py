"""The signs that a run's learning is in trouble, each with its thresholds. Pure functions on a
`Course`.

`broken` needs what no healthy run shows: weights that stay although the learning rate should move
them, no gradient at all for thousands of rollouts, a loss that is not a number, sampling and
training that disagree grossly, rollouts that nearly all fail.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from lachesis.monitor.run_history import (
    MIN_JUDGED_STEPS,
    AdvisedEdit,
    Finding,
    RunHistory,
    Step,
    compute_recent_mean,
    get_recent_values,
)
from lachesis.monitor.trend import WINDOW, HeldOutTrendPoint

MAX_UNCHANGED_NATS, MAX_UNCHANGED_NATS_PER_RATE = 1e-7, 1e-3
"""Nats per token: the same weights give the same log-probabilities up to rounding; and the same per
unit of the learning rate. An update of the embedded engine's tiny model changes a token by about 6
nats per unit, at every rate from 1e-7 to 1e-3."""
MIN_LEARNING_RATE = 1e-6
"""Below this learning rate, rounding may hide what an update changes."""
MIN_SHARE_OF_PEAK_RATE = 0.01
"""The same for a rate below this share of the run's highest one: the start of a warm-up and the end
of a schedule."""
SOLVED_REWARD = 0.9
"""Mean reward from which a task counts as solved."""
MIN_LEVEL_CHANGE = 0.1
"""Difference of mean rewards that counts as a change of level."""
MIN_ZERO_SIGNAL_ROLLOUTS = 5000
"""So many rollouts without one signal exclude, at 99 %, that one in a thousand is worth something.
"""
SUSPECT_LOGPROB_GAP, BROKEN_LOGPROB_GAP = 0.25, 1.0
"""Mean absolute difference of sampling and training log-probabilities in nats per token. At 1 the
ratio of the importance-sampling loss is off by a factor of e for a typical token."""
MIN_DROP_STANDARD_ERRORS = 4.0
"""Standard errors by which a fall of the reward counts, beside those by which the best of many
windows is too high."""
EARLY_RUN_SHARE, LATE_RUN_SHARE = 0.1, 0.45
"""Shares of the run: before `EARLY` a missing rise says nothing; from `LATE` on a rise that cannot
be told from noise is called missing."""
MIN_REWARD_RISE = 0.05
"""Before `LATE` a rise is called missing only if the whole run could not rise by more than this, in
units of the reward (or of its mean, where that is larger)."""
MIN_GAP_GROWTH = 0.1
"""Growth of the gap between training and held-out reward that counts."""
MIN_HELD_OUT_POINTS = 4
"""Held-out results before their course is judged."""


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
        evidence=f"the sampled weights have not changed in the last {num_unchanged} updates, although the "
        f"learning rate was at least {min_rate:.2g}",
        advice=f"{history.facts.format_stop_prefix()}look in {history.facts.format_logs_command('trainer')} for what the server answered to the updates",
    )


def _collect_weight_changes(steps: Sequence[Step], min_rate: float) -> list[tuple[float, float]]:
    """Return the changes of the weights by updates whose learning rate was at least `least`, and
    that rate.

    A line may have the change that the update of the line before has made, so of the two rates the
    lower one counts.
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
        evidence=f"the loss was not a finite number in {len(bad_steps)} of the last {len(last_steps)} steps",
        advice=f"{history.facts.format_stop_prefix()}{history.facts.advise_lower_learning_rate(bad_steps[0] - 1)}",
    )


def find_zero_signal(history: RunHistory) -> Finding | None:
    """Find groups whose rewards are all equal, which give no gradient.

    A run whose reward has risen may have learned all that its environment pays for, which may be
    less than 1. A run without any signal since its start may still meet its first success, so it is
    broken only after `SILENT_ROLLOUTS`.
    """
    zero_signal_shares, reward = (
        get_recent_values(history.last_steps, "batch/zero_signal_share"),
        compute_recent_mean(history.last_steps, "reward/mean") or 0.0,
    )
    has_no_signal = (
        history.trend.silent_steps >= min(len(zero_signal_shares), MIN_JUDGED_STEPS)
        and min(zero_signal_shares, default=0.0) == 1.0
    )
    is_mostly_zero_signal = (
        len(zero_signal_shares) >= WINDOW and statistics.fmean(zero_signal_shares) >= 0.9
    )
    if reward >= SOLVED_REWARD or not (
        is_mostly_zero_signal or (has_no_signal and len(zero_signal_shares) >= MIN_JUDGED_STEPS)
    ):
        return None
    has_risen = (
        reward - (compute_recent_mean(history.first_steps, "reward/mean") or 0.0) > MIN_LEVEL_CHANGE
    )
    has_fallen = history.trend.best is not None and history.trend.best - reward > MIN_LEVEL_CHANGE
    has_lasted = history.trend.silent_rollouts >= MIN_ZERO_SIGNAL_ROLLOUTS or has_fallen
    is_broken = has_no_signal and len(zero_signal_shares) >= WINDOW and has_lasted and not has_risen
    return Finding(
        word="broken" if is_broken else "suspect",
        evidence=f"{statistics.fmean(zero_signal_shares):.0%} of the groups of the last {len(zero_signal_shares)} steps had "
        f"equal rewards, at mean {reward:.3f}: {'no' if has_no_signal else 'hardly any'} gradient",
        advice=advise_more_signal(history),
    )


def advise_more_signal(history: RunHistory) -> str:
    """Return an advice for a model that solves all of the items it is given, or none."""
    facts = history.facts
    parts = [
        f"{facts.format_test_command()} shows what this model reaches; choose easier items or a stronger model"
    ]
    if facts.tiny_model:
        parts.append(
            f"`lachesis model build --for {facts.environment}` teaches the tiny model the task first"
        )
    larger_group_size = 2 * facts.group_size
    is_divisible = (
        larger_group_size and facts.batch_size and facts.batch_size % larger_group_size == 0
    )
    if is_divisible and "group_size" in facts.tunable_fields:
        parts.append(
            f"larger groups differ more often: {facts.format_train_command(f'group_size={larger_group_size}')}"
        )
    return "; ".join(parts)


def find_dropped_rollouts(history: RunHistory) -> Finding | None:
    """Find an environment that leaves out nearly all of its rollouts."""
    dropped, trained = (
        sum(get_recent_values(history.last_steps, "rollouts/dropped")),
        sum(get_recent_values(history.last_steps, "batch/rollouts")),
    )
    if len(history.last_steps) < WINDOW or not dropped or dropped / (dropped + trained) < 0.95:
        return None
    return Finding(
        word="suspect",
        evidence=f"the environment left out {dropped / (dropped + trained):.0%} of the rollouts of the "
        f"last {WINDOW} steps, for equal rewards, their length or the size of their group",
        advice=advise_more_signal(history),
    )


def find_logprob_gap(history: RunHistory) -> Finding | None:
    """Find log-probabilities that differ between sampling and training."""
    gap = compute_recent_mean(history.last_steps, "logprobs/gap", 10)
    if gap is None or gap < SUSPECT_LOGPROB_GAP:
        return None
    advice = history.facts.advise_training(
        AdvisedEdit("max_batches_offpolicy", "1", "fresher rollouts"),
        AdvisedEdit("loss_fn", "ppo", "a clipped loss"),
        start_from=_find_newest_checkpoint(history),
    )
    return Finding(
        word="broken" if gap >= BROKEN_LOGPROB_GAP else "suspect",
        evidence=f"sampling and training log-probabilities differ by {gap:.2f} nats per token",
        advice=f"{history.facts.format_stop_prefix()}{advice}",
    )


def _find_newest_checkpoint(history: RunHistory) -> int | None:
    return max(history.facts.checkpoints, default=None)


def find_invalid_rollouts(history: RunHistory) -> Finding | None:
    """Find rollouts without a usable score, also those since the last step."""
    invalid, valid = (
        sum(get_recent_values(history.last_steps, "rollouts/invalid")),
        sum(get_recent_values(history.last_steps, "batch/rollouts")),
    )
    share, recent_invalid = (
        invalid / max(1, invalid + valid),
        count_invalid_since_last_step(history),
    )
    has_enough = recent_invalid[0] >= 3 * max(1, history.facts.batch_size)
    if share < 0.2 and not (has_enough and recent_invalid[1] >= 0.8):
        return None
    is_recent_worse = has_enough and recent_invalid[1] > share
    span = (
        "since the last step"
        if is_recent_worse
        else f"of the last {min(WINDOW, len(history.last_steps))} steps"
    )
    return Finding(
        word="broken" if max(share, recent_invalid[1] * has_enough) >= 0.8 else "suspect",
        evidence=f"{recent_invalid[1] if is_recent_worse else share:.0%} of the rollouts {span} had no usable score"
        + describe_invalid_reasons(history),
        advice=f"{history.facts.format_stop_prefix()}look in {history.facts.format_logs_command('env')} for what the environment raises",
    )


def count_invalid_since_last_step(history: RunHistory) -> tuple[float, float]:
    """Return the rollouts without a usable score since the last step, and their share."""
    counts, trend = history.facts.environment_counts, history.trend
    invalid = max(0.0, float(counts.get("invalid") or 0) - trend.invalid)
    valid = max(0.0, float(counts.get("rollouts") or 0) - trend.rollouts)
    return invalid, invalid / max(1.0, invalid + valid)


def describe_invalid_reasons(history: RunHistory) -> str:
    """Return why most of the rollouts had no usable score, for the end of a sentence."""
    errors = history.facts.environment_counts.get("errors") or {}
    most_frequent = sorted(errors.items(), key=lambda item: -item[1])[:2]
    return (
        f" ({'; '.join(f'{text}, {count} times' for text, count in most_frequent)})"
        if most_frequent
        else ""
    )


def find_environment_without_reward(history: RunHistory) -> Finding | None:
    """Find, among several environments, one that never gave a reward above 0."""
    keys = {
        key
        for step in history.last_steps[-1:]
        for key in step
        if key.startswith("environments/") and key.endswith("/reward_mean")
    }
    rewards = {
        key.split("/")[1]: get_recent_values(history.last_steps, key) for key in sorted(keys)
    }
    unrewarded_environments = [
        name for name, numbers in rewards.items() if len(numbers) >= WINDOW and not any(numbers)
    ]
    if not unrewarded_environments:
        return None
    return Finding(
        word="suspect",
        evidence=f"no rollout of {', '.join(unrewarded_environments)} was worth more than 0 in the last {WINDOW} steps",
        advice=f"{history.facts.format_test_command(unrewarded_environments[0])} shows whether the model can do a little of that task",
    )


def find_flat_reward(history: RunHistory) -> Finding | None:
    """Find a mean reward that has not risen since the start, as far as its noise lets one tell.

    From `LATE` of the run on, a rise that cannot be told from noise is called missing. Before that
    the steps must show that even the largest rise that agrees with them would be small at the end
    of the run.
    """
    total, trend = history.facts.total_steps, history.trend
    rise = trend.estimate_rise()
    if (
        not total
        or rise is None
        or trend.last_step <= EARLY_RUN_SHARE * total
        or trend.num_steps < WINDOW
        or trend.risen_at is not None
    ):
        return None
    level = statistics.fmean(trend.recent)
    if level >= SOLVED_REWARD or rise.is_significant:
        return None
    max_rise = max(0.0, rise.compute_max_rise(total))
    if trend.last_step < LATE_RUN_SHARE * total and max_rise > MIN_REWARD_RISE * max(
        1.0, abs(level)
    ):
        return None
    return Finding(
        word="not learning",
        evidence=f"the mean reward has not risen in {rise.steps} steps, now {level:.3f}: its slope is "
        f"{rise.slope * 100:+.4f} ± {rise.standard_error * 100:.4f} per 100 steps",
        advice=f"{history.facts.format_report_command()} shows sampled rollouts; {history.facts.format_test_command()} shows whether "
        "the model reaches any reward; a run that may take off late can simply go on",
    )


def find_reward_drop(history: RunHistory) -> Finding | None:
    """Find a mean reward that is far below the best that a window of this attempt had."""
    rewards, trend = get_recent_values(history.last_steps, "reward/mean"), history.trend
    if trend.best is None or len(rewards) < WINDOW:
        return None
    current_mean = statistics.fmean(rewards)
    noise = max(statistics.pstdev(rewards) / math.sqrt(WINDOW), trend.window_standard_error)
    # of the largest of so many
    selection_allowance = math.sqrt(2 * math.log(max(2, 2 * trend.num_steps / WINDOW)))
    if trend.best - current_mean <= max(
        0.1 * (abs(trend.best) or 1.0), (MIN_DROP_STANDARD_ERRORS + selection_allowance) * noise
    ):
        return None
    return Finding(
        word="suspect",
        evidence=f"the mean reward fell from {trend.best:.3f} around step {trend.best_step} to {current_mean:.3f}",
        advice=f"{history.facts.format_stop_prefix()}{history.facts.advise_lower_learning_rate(trend.best_step)}",
    )


def _average_first_and_last_third(
    points: Sequence[HeldOutTrendPoint],
) -> tuple[HeldOutTrendPoint, HeldOutTrendPoint] | None:
    """Return the means of the first and the last third of the held-out results."""
    if len(points) < MIN_HELD_OUT_POINTS:
        return None
    third_size = max(1, len(points) // 3)
    return _average_points(points[:third_size]), _average_points(points[-third_size:])


def _average_points(points: Sequence[HeldOutTrendPoint]) -> HeldOutTrendPoint:
    """Return the mean of the results. Its error is that of one result: the items are the same each
    time, so their errors do not average out."""
    return HeldOutTrendPoint(
        step=points[-1].step,
        share=statistics.fmean(point.share for point in points),
        error=statistics.fmean(point.error for point in points),
        reward=statistics.fmean(point.reward for point in points),
        reward_error=statistics.fmean(point.reward_error for point in points),
    )


def find_held_out_drop(history: RunHistory) -> Finding | None:
    """Find a held-out result that falls while the reward in training rises."""
    points = history.trend.held_out
    first_and_last = _average_first_and_last_third(points)
    if first_and_last is None:
        return None
    first_third, last_third = first_and_last
    best = max(points, key=lambda point: point.share)
    has_reward_risen = last_third.reward - first_third.reward > 2 * math.hypot(
        first_third.reward_error, last_third.reward_error
    )
    has_held_out_fallen = first_third.share - last_third.share > 1.96 * math.hypot(
        first_third.error, last_third.error
    )
    if not (has_reward_risen and has_held_out_fallen):
        return None
    return Finding(
        word="suspect",
        evidence=f"the reward in training rose from {first_third.reward:.3f} to {last_third.reward:.3f} while the "
        f"held-out result fell from {first_third.share:.1%} to {last_third.share:.1%}",
        advice=f"{history.facts.format_stop_prefix()}{history.facts.advise_lower_learning_rate(best.step)}; the best held-out "
        f"result is that of step {best.step}",
    )


def find_generalization_gap(history: RunHistory) -> Finding | None:
    """Find a gap between training and held-out results that grows by more than its uncertainty."""
    points = history.trend.held_out
    first_and_last = _average_first_and_last_third(points)
    if first_and_last is None or any(not 0 <= point.reward <= 1 for point in points):
        return None  # rewards of another scale than shares
    first_third, last_third = first_and_last
    gap_growth = (last_third.reward - last_third.share) - (first_third.reward - first_third.share)
    standard_error = math.hypot(
        first_third.error, last_third.error, first_third.reward_error, last_third.reward_error
    )
    if last_third.reward <= last_third.share or gap_growth <= max(
        MIN_GAP_GROWTH, 1.96 * standard_error
    ):
        return None
    return Finding(
        word="suspect",
        evidence=f"the gap between training and held-out results has grown by {gap_growth:.3f}: reward "
        f"{last_third.reward:.3f} in training, {last_third.share:.1%} of the held-out items",
        advice=f"{history.facts.format_report_command()} shows what is rewarded; more training items, or a stop at the "
        "best held-out result, help against learning the items by heart",
    )


def find_entropy_collapse(history: RunHistory) -> Finding | None:
    """Find a policy that always gives the same answers at a low reward."""
    entropy, reward = (
        compute_recent_mean(history.last_steps, "entropy/sampling", 10),
        compute_recent_mean(history.last_steps, "reward/mean", 10),
    )
    if entropy is None or reward is None or entropy >= 0.01 or reward >= 0.5:
        return None
    return Finding(
        word="suspect",
        evidence=f"the policy's entropy is {entropy:.4f} nats per token at a mean reward of {reward:.3f}: it tries nothing new",
        advice=f"{history.facts.format_stop_prefix()}{history.facts.advise_lower_learning_rate(history.trend.best_step)}",
    )


def find_length_drift(history: RunHistory) -> Finding | None:
    """Find completions that became much longer or shorter."""
    first_length, last_length = (
        compute_recent_mean(history.first_steps, "length/mean"),
        compute_recent_mean(history.last_steps, "length/mean"),
    )
    if (
        len(history.last_steps) < 2 * WINDOW
        or not first_length
        or not last_length
        or first_length / 3 < last_length < 3 * first_length
    ):
        return None
    return Finding(
        word="suspect",
        evidence=f"completions went from {first_length:.0f} to {last_length:.0f} tokens",
        advice=f"{history.facts.format_report_command()} shows sampled rollouts: see whether the reward favours their length",
    )


def find_truncation(history: RunHistory) -> Finding | None:
    """Find completions that the limit of tokens cuts off."""
    share, limit = (
        compute_recent_mean(history.last_steps, "rollouts/truncated_share", 5),
        history.facts.max_token_length,
    )
    if share is None or share < 0.5:
        return None
    facts = history.facts
    if limit is None or "max_token_length" not in facts.tunable_fields:
        advice = f"{facts.format_report_command()} shows sampled rollouts; ask for shorter answers in the prompt"
    else:
        longer_command = facts.format_train_command(f"max_token_length={2 * limit}")
        advice = f"{longer_command} allows longer answers; or ask for shorter ones in the prompt"
    return Finding(
        word="suspect",
        evidence=f"{share:.0%} of the completions are cut off at their limit of tokens",
        advice=advice,
    )


DETECTORS: tuple[Callable[[RunHistory], Finding | None], ...] = (
    find_unchanged_weights,
    find_non_finite_loss,
    find_zero_signal,
    find_dropped_rollouts,
    find_logprob_gap,
    find_invalid_rollouts,
    find_environment_without_reward,
    find_reward_drop,
    find_held_out_drop,
    find_generalization_gap,
    find_flat_reward,
    find_entropy_collapse,
    find_length_drift,
    find_truncation,
)
