"""Detect trouble in rollouts: no signal, invalid ones, truncation, entropy, length."""

import statistics

from lachesis.monitor.reward_detectors import SOLVED_REWARD
from lachesis.monitor.reward_trend import WINDOW
from lachesis.monitor.run_history import (
    MIN_JUDGED_STEPS,
    MIN_LEVEL_CHANGE,
    Finding,
    RunHistory,
    Step,
    compute_recent_mean,
    get_recent_values,
)
from lachesis.runs.suggested_commands import format_command

# Rollouts without any signal after which a run is broken. With this many, a success rate of one in
# a thousand can be excluded at a confidence of 99 %.
MIN_ZERO_SIGNAL_ROLLOUTS = 5000
# Nats per token below which a policy always gives the same answers.
MIN_ENTROPY = 0.01


def find_zero_signal(history: RunHistory) -> Finding | None:
    """Find groups whose rewards are all equal, which contribute no gradient.

    A run whose reward has risen may have learned everything that its environment rewards, even at a
    mean below 1. A run without any signal since its start may still find its first success, so it
    is broken only after `MIN_ZERO_SIGNAL_ROLLOUTS`.
    """
    zero_signal_shares, reward = (
        get_recent_values(history.last_steps, "batch/zero_signal_share"),
        compute_recent_mean(history.last_steps, "reward/mean") or 0.0,
    )
    has_no_signal = (
        history.trend.zero_signal_steps >= min(len(zero_signal_shares), MIN_JUDGED_STEPS)
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
    has_lasted = (
        history.trend.zero_signal_rollouts >= MIN_ZERO_SIGNAL_ROLLOUTS or history.has_collapsed
    )
    is_broken = has_no_signal and len(zero_signal_shares) >= WINDOW and has_lasted and not has_risen
    return Finding(
        word="broken" if is_broken else "suspect",
        evidence=f"{statistics.fmean(zero_signal_shares):.0%} of the groups of the last "
        f"{len(zero_signal_shares)} steps had "
        f"equal rewards, at mean {reward:.3f}: {'no' if has_no_signal else 'hardly any'} gradient",
        advice=advise_more_signal(history),
    )


def advise_more_signal(history: RunHistory) -> str:
    """Return advice for a model that solves either all or none of its items.

    Where the reward was higher before, the items are not what is wrong.
    """
    facts = history.facts
    if history.has_collapsed:
        return history.advise_return(history.trend.best_step)
    parts = [
        f"{facts.format_test_command()} shows what this model reaches; choose easier items or a "
        f"stronger model"
    ]
    if facts.can_be_taught:
        build = format_command("model", "build", "--for", facts.environment)
        parts.append(
            f"`{build}` teaches a tiny model the task, which is then the default model of "
            f"`{format_command('train', facts.environment)}`"
        )
    larger_group_size = 2 * facts.group_size
    is_divisible = (
        larger_group_size and facts.batch_size and facts.batch_size % larger_group_size == 0
    )
    if is_divisible and "group_size" in facts.tunable_fields:
        parts.append(
            f"larger groups differ more often: "
            f"{facts.format_train_command(f'group_size={larger_group_size}')}"
        )
    return "; ".join(parts)


def find_dropped_rollouts(history: RunHistory) -> Finding | None:
    """Find an environment that drops nearly all of its rollouts."""
    dropped, trained = (
        sum(get_recent_values(history.last_steps, "rollouts/dropped")),
        sum(get_recent_values(history.last_steps, "batch/rollouts")),
    )
    if len(history.last_steps) < WINDOW or not dropped or dropped / (dropped + trained) < 0.95:
        return None
    return Finding(
        word="suspect",
        evidence=f"the environment left out {dropped / (dropped + trained):.0%} of the rollouts of "
        f"the last {WINDOW} steps, for equal rewards, their length or the size of their group",
        advice=advise_more_signal(history),
    )


def find_invalid_rollouts(history: RunHistory) -> Finding | None:
    """Find rollouts without a usable score, including those since the last step.

    All rollouts of a group in whose scoring the environment raised are lost.
    """
    group_size = history.facts.group_size
    invalid = sum(_count_unscored(step, group_size) for step in history.last_steps[-WINDOW:])
    valid = sum(get_recent_values(history.last_steps, "batch/rollouts"))
    share, recent_invalid = (
        invalid / max(1, invalid + valid),
        count_invalid_since_last_step(history),
    )
    has_enough = recent_invalid[0] >= 3 * max(1, history.facts.batch_size)
    if share < 0.2 and not (has_enough and recent_invalid[1] >= 0.8):
        return None
    is_recent_worse = has_enough and recent_invalid[1] > share
    if is_recent_worse:
        span = "since the last step"
    else:
        span = f"of the last {min(WINDOW, len(history.last_steps))} steps"
    since = _find_first_unscored_step(history)
    return Finding(
        word="broken" if max(share, recent_invalid[1] * has_enough) >= 0.8 else "suspect",
        evidence=f"{recent_invalid[1] if is_recent_worse else share:.0%} of the rollouts {span} "
        f"had no usable score{since}" + describe_invalid_reasons(history),
        advice=f"{history.facts.format_stop_prefix()}look in "
        f"{history.facts.format_logs_command('env')} for what the environment raises",
    )


def _count_unscored(step: Step, group_size: int) -> float:
    """Return how many rollouts of a step have no usable score."""
    return (step.get("rollouts/invalid") or 0) + group_size * (step.get("rollouts/raised") or 0)


def _find_first_unscored_step(history: RunHistory) -> str:
    """Return the step from which on rollouts have no score, as a part of a sentence.

    Nothing is returned where they had none from the beginning, or only now and then.
    """
    group_size = history.facts.group_size
    unscored = [
        step["step"] for step in history.last_steps if _count_unscored(step, group_size) > 0
    ]
    if not unscored or unscored[0] == history.last_steps[0]["step"]:
        return ""
    since = [step for step in history.last_steps if step["step"] >= unscored[0]]
    # A step whose groups all came before the fault, or were easy, is no reason to doubt it.
    if len(unscored) * 2 < len(since):
        return ""
    return f", since step {unscored[0]}"


def count_invalid_since_last_step(history: RunHistory) -> tuple[float, float]:
    """Return the number of rollouts without a usable score since the last step, and their share."""
    counts, trend = history.facts.environment_counts, history.trend
    raised = 0.0
    if trend.raised is not None:
        raised = max(0.0, float(counts.get("failed_groups") or 0) - trend.raised)
    invalid = max(0.0, float(counts.get("invalid_rollouts") or 0) - trend.invalid)
    invalid += raised * history.facts.group_size
    valid = max(0.0, float(counts.get("rollouts") or 0) - trend.rollouts)
    return invalid, invalid / max(1.0, invalid + valid)


def describe_invalid_reasons(history: RunHistory) -> str:
    """Return the most frequent reasons for invalid rollouts, as the end of a sentence."""
    errors = history.facts.environment_counts.get("errors") or {}
    most_frequent = sorted(errors.items(), key=lambda item: -item[1])[:2]
    if most_frequent:
        return f" ({'; '.join(f'{text}, {count} times' for text, count in most_frequent)})"
    return ""


def find_entropy_collapse(history: RunHistory) -> Finding | None:
    """Find a policy that always gives the same answers although the reward is low."""
    entropy, reward = (
        compute_recent_mean(history.last_steps, "entropy/sampling", 10),
        compute_recent_mean(history.last_steps, "reward/mean", 10),
    )
    if entropy is None or reward is None or entropy >= MIN_ENTROPY or reward >= 0.5:
        return None
    last_good_step = history.find_last_good_step(
        "entropy/sampling", lambda value: value >= MIN_ENTROPY
    )
    return Finding(
        word="suspect",
        evidence=f"the policy's entropy is {entropy:.4f} nats per token at a mean reward of "
        f"{reward:.3f}: it tries nothing new",
        advice=history.advise_return(last_good_step),
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
        advice=f"{history.facts.format_report_command()} shows sampled rollouts: see whether the "
        f"reward favours their length",
    )


def find_truncation(history: RunHistory) -> Finding | None:
    """Find completions that are cut off at the token limit."""
    share, limit = (
        compute_recent_mean(history.last_steps, "rollouts/truncated_share", 5),
        history.facts.max_token_length,
    )
    if share is None or share < 0.5:
        return None
    facts = history.facts
    if limit is None or "max_token_length" not in facts.tunable_fields:
        report_command = facts.format_report_command()
        advice = f"{report_command} shows sampled rollouts; ask for shorter answers in the prompt"
    else:
        longer_command = facts.format_train_command(f"max_token_length={2 * limit}")
        advice = f"{longer_command} allows longer answers; or ask for shorter ones in the prompt"
    return Finding(
        word="suspect",
        evidence=f"{share:.0%} of the completions are cut off at their limit of tokens",
        advice=advice,
    )
