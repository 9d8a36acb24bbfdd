"""Detect trouble in rewards: no rise, a drop, and falling held-out results."""

import math
import statistics
from collections.abc import Sequence

from lachesis.monitor.reward_trend import WINDOW, HeldOutTrendPoint
from lachesis.monitor.run_history import Finding, RunHistory, get_recent_values

# Mean reward from which a task counts as solved.
SOLVED_REWARD = 0.9
# Standard errors by which the reward must have fallen, in addition to the allowance for having
# selected the best of many windows.
MIN_DROP_STANDARD_ERRORS = 4.0
# Before the share `LATE_RUN_SHARE` of the run, a missing rise is reported only if the whole run
# could not gain more than this, in units of the reward (or of its mean, if that is larger).
MIN_REWARD_RISE = 0.05
# Growth of the gap between training and held-out reward that is reported.
MIN_GAP_GROWTH = 0.1
# Share of the rise in training that held-out results must have followed for the gap to be usual.
USUAL_SHARE_OF_RISE = 0.5
# Held-out results that are needed before their trend is judged.
MIN_HELD_OUT_POINTS = 4


def find_environment_without_reward(history: RunHistory) -> Finding | None:
    """Find, among several environments, one that never returned a reward above 0."""
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
        evidence=f"no rollout of {', '.join(unrewarded_environments)} was worth more than 0 in the "
        f"last {WINDOW} steps",
        advice=f"{history.facts.format_test_command(unrewarded_environments[0])} shows whether the "
        f"model can do a little of that task",
    )


def find_flat_reward(history: RunHistory) -> Finding | None:
    """Find a mean reward that has not risen since the start, as far as its noise lets one tell.

    From the share `LATE_RUN_SHARE` of the run on, a rise that cannot be told from noise is reported
    as missing. Before that, the steps must show that even the largest rise that is consistent with
    them would be small at the end of the run.
    """
    total, trend = history.facts.total_steps, history.trend
    rise = trend.estimate_rise()
    if not total or rise is None or rise.is_significant or trend.risen_at is not None:
        return None
    if trend.last_step <= EARLY_RUN_SHARE * total or trend.num_steps < WINDOW:
        return None
    level = statistics.fmean(trend.recent_rewards)
    if level >= SOLVED_REWARD or find_reward_drop(history) is not None:
        return None
    max_rise = max(0.0, rise.compute_max_rise(total))
    may_still_rise = max_rise > MIN_REWARD_RISE * max(1.0, abs(level))
    if may_still_rise and trend.last_step < LATE_RUN_SHARE * total:
        return None
    return Finding(
        word="not learning",
        evidence=f"the mean reward has not risen in {rise.steps} steps, now {level:.3f}: its slope "
        f"is {rise.slope * 100:+.4f} ± {rise.standard_error * 100:.4f} per 100 steps",
        advice=f"{history.facts.format_report_command()} shows sampled rollouts; "
        f"{history.facts.format_test_command()} shows whether "
        "the model reaches any reward; a run that may take off late can simply go on",
    )


def find_reward_drop(history: RunHistory) -> Finding | None:
    """Find a mean reward that is far below the best window of this attempt."""
    rewards, trend = get_recent_values(history.last_steps, "reward/mean"), history.trend
    if trend.best is None or len(rewards) < WINDOW:
        return None
    current_mean = statistics.fmean(rewards)
    noise = max(statistics.pstdev(rewards) / math.sqrt(WINDOW), trend.window_standard_error)
    # allowance for the maximum of this many independent windows
    selection_allowance = math.sqrt(2 * math.log(max(2, 2 * trend.num_steps / WINDOW)))
    if trend.best - current_mean <= max(
        0.1 * (abs(trend.best) or 1.0), (MIN_DROP_STANDARD_ERRORS + selection_allowance) * noise
    ):
        return None
    return Finding(
        word="suspect",
        evidence=f"the mean reward fell from {trend.best:.3f} around step {trend.best_step} to "
        f"{current_mean:.3f}",
        advice=history.advise_return(trend.best_step),
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
    """Return the mean of the results.

    Its standard error is that of one result: the items are the same each time, so their errors do
    not average out.
    """
    return HeldOutTrendPoint(
        step=points[-1].step,
        share=statistics.fmean(point.share for point in points),
        error=statistics.fmean(point.error for point in points),
        reward=statistics.fmean(point.reward for point in points),
        reward_error=statistics.fmean(point.reward_error for point in points),
    )


def find_held_out_drop(history: RunHistory) -> Finding | None:
    """Find a held-out result that falls while the training reward rises."""
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
        evidence=f"the reward in training rose from {first_third.reward:.3f} to "
        f"{last_third.reward:.3f} while the "
        f"held-out result fell from {first_third.share:.1%} to {last_third.share:.1%}",
        advice=f"{history.advise_return(best.step)}; the best held-out result is that of step "
        f"{best.step}",
    )


def find_generalization_gap(history: RunHistory) -> Finding | None:
    """Find a gap between training and held-out results that grows by more than its uncertainty.

    A gap is usual where held-out results have followed at least half of the rise in training.
    """
    points = history.trend.held_out
    first_and_last = _average_first_and_last_third(points)
    if first_and_last is None or any(not 0 <= point.reward <= 1 for point in points):
        return None  # rewards of another scale than shares
    first_third, last_third = first_and_last
    gap_growth = (last_third.reward - last_third.share) - (first_third.reward - first_third.share)
    standard_error = math.hypot(
        first_third.error, last_third.error, first_third.reward_error, last_third.reward_error
    )
    follows = last_third.share - first_third.share >= USUAL_SHARE_OF_RISE * (
        last_third.reward - first_third.reward
    )
    is_certain = gap_growth > max(MIN_GAP_GROWTH, 1.96 * standard_error)
    if last_third.reward <= last_third.share or follows or not is_certain:
        return None
    return Finding(
        word="suspect",
        evidence=f"the gap between training and held-out results has grown by {gap_growth:.3f}: "
        f"reward {last_third.reward:.3f} in training, {last_third.share:.1%} of the held-out items",
        advice=f"{history.facts.format_report_command()} shows what is rewarded; more training "
        f"items, or a stop at the "
        "best held-out result, help against learning the items by heart",
    )


# Shares of the run: before `EARLY_RUN_SHARE` a missing rise says nothing; from `LATE_RUN_SHARE` on,
# a rise that cannot be told from noise is reported as missing.
EARLY_RUN_SHARE, LATE_RUN_SHARE = 0.1, 0.45
