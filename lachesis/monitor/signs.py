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

from lachesis.monitor.course import LEAST_STEPS, Course, Edit, Finding, Step, mean, values
from lachesis.monitor.trend import WINDOW, HeldOutPoint

UNCHANGED, UNCHANGED_PER_RATE = 1e-7, 1e-3
"""Nats per token: the same weights give the same log-probabilities up to rounding; and the same per
unit of the learning rate. An update of the embedded engine's tiny model changes a token by about 6
nats per unit, at every rate from 1e-7 to 1e-3."""
LEAST_RATE = 1e-6
"""Below this learning rate, rounding may hide what an update changes."""
LEAST_SHARE_OF_PEAK = 0.01
"""The same for a rate below this share of the run's highest one: the start of a warm-up and the end
of a schedule."""
SOLVED = 0.9
"""Mean reward from which a task counts as solved."""
RISEN = 0.1
"""Difference of mean rewards that counts as a change of level."""
SILENT_ROLLOUTS = 5000
"""So many rollouts without one signal exclude, at 99 %, that one in a thousand is worth something."""
GAP_SUSPECT, GAP_BROKEN = 0.25, 1.0
"""Mean absolute difference of sampling and training log-probabilities in nats per token. At 1 the
ratio of the importance-sampling loss is off by a factor of e for a typical token."""
FAR = 4.0
"""Standard errors by which a fall of the reward counts, beside those by which the best of many
windows is too high."""
EARLY, LATE = 0.1, 0.45
"""Shares of the run: before `EARLY` a missing rise says nothing; from `LATE` on a rise that cannot
be told from noise is called missing."""
LEAST_RISE = 0.05
"""Before `LATE` a rise is called missing only if the whole run could not rise by more than this, in
units of the reward (or of its mean, where that is larger)."""
GAP_GROWN = 0.1
"""Growth of the gap between training and held-out reward that counts."""
LEAST_POINTS = 4
"""Held-out results before their course is judged."""


def weights_stay(course: Course) -> Finding | None:
    """Find updates that did not change the weights although their learning rate was high enough."""
    least = max(LEAST_RATE, LEAST_SHARE_OF_PEAK * course.trend.peak_rate)
    still = 0
    for change, rate in reversed(_changes(course.last, least)):
        if change > max(UNCHANGED, UNCHANGED_PER_RATE * rate):
            break
        still += 1
    if still < LEAST_STEPS:
        return None
    return Finding(
        word="broken",
        evidence=f"the sampled weights have not changed in the last {still} updates, although the "
        f"learning rate was at least {least:.2g}",
        advice=f"{course.facts.stop()}look in {course.facts.logs('trainer')} for what the server answered to the updates",
    )


def _changes(steps: Sequence[Step], least: float) -> list[tuple[float, float]]:
    """Return the changes of the weights by updates whose learning rate was at least `least`, and
    that rate.

    A line may have the change that the update of the line before has made, so of the two rates the
    lower one counts.
    """
    changes = []
    for before, step in itertools.pairwise([{}, *steps]):
        rate, change = step.get("train/learning_rate"), step.get("weights/change")
        if rate is None or change is None:
            continue
        rate_before = before.get("train/learning_rate")
        lower = rate if rate_before is None else min(rate, rate_before)
        if lower >= least:
            changes.append((change, lower))
    return changes[-WINDOW:]


def loss_is_not_a_number(course: Course) -> Finding | None:
    """Find a loss that is NaN or infinite."""
    last = course.last[-LEAST_STEPS:]
    bad = [step["step"] for step in last if "train/loss" in step and step["train/loss"] is None]
    if len(bad) < 2:
        return None
    return Finding(
        word="broken",
        evidence=f"the loss was not a finite number in {len(bad)} of the last {len(last)} steps",
        advice=f"{course.facts.stop()}{course.facts.advise_slower(bad[0] - 1)}",
    )


def no_signal(course: Course) -> Finding | None:
    """Find groups whose rewards are all equal, which give no gradient.

    A run whose reward has risen may have learned all that its environment pays for, which may be
    less than 1. A run without any signal since its start may still meet its first success, so it is
    broken only after `SILENT_ROLLOUTS`.
    """
    silent, reward = values(course.last, "batch/zero_signal_share"), mean(course.last, "reward/mean") or 0.0
    none_at_all = course.trend.silent_steps >= min(len(silent), LEAST_STEPS) and min(silent, default=0.0) == 1.0
    often = len(silent) >= WINDOW and statistics.fmean(silent) >= 0.9
    if reward >= SOLVED or not (often or (none_at_all and len(silent) >= LEAST_STEPS)):
        return None
    risen = reward - (mean(course.first, "reward/mean") or 0.0) > RISEN
    fallen = course.trend.best is not None and course.trend.best - reward > RISEN
    for_long = course.trend.silent_rollouts >= SILENT_ROLLOUTS or fallen
    broken = none_at_all and len(silent) >= WINDOW and for_long and not risen
    return Finding(
        word="broken" if broken else "suspect",
        evidence=f"{statistics.fmean(silent):.0%} of the groups of the last {len(silent)} steps had "
        f"equal rewards, at mean {reward:.3f}: {'no' if none_at_all else 'hardly any'} gradient",
        advice=what_gives_a_signal(course),
    )


def what_gives_a_signal(course: Course) -> str:
    """Return an advice for a model that solves all of the items it is given, or none."""
    facts = course.facts
    parts = [f"{facts.test()} shows what this model reaches; choose easier items or a stronger model"]
    if facts.tiny_model:
        parts.append(f"`lachesis model build --for {facts.environment}` teaches the tiny model the task first")
    larger = 2 * facts.group_size
    fits = larger and facts.batch_size and facts.batch_size % larger == 0
    if fits and "group_size" in facts.tunable:
        parts.append(f"larger groups differ more often: {facts.train(f'group_size={larger}')}")
    return "; ".join(parts)


def nothing_is_sent(course: Course) -> Finding | None:
    """Find an environment that leaves out nearly all of its rollouts."""
    dropped, trained = sum(values(course.last, "rollouts/dropped")), sum(values(course.last, "batch/rollouts"))
    if len(course.last) < WINDOW or not dropped or dropped / (dropped + trained) < 0.95:
        return None
    return Finding(
        word="suspect",
        evidence=f"the environment left out {dropped / (dropped + trained):.0%} of the rollouts of the "
        f"last {WINDOW} steps, for equal rewards, their length or the size of their group",
        advice=what_gives_a_signal(course),
    )


def sampler_and_trainer_disagree(course: Course) -> Finding | None:
    """Find log-probabilities that differ between sampling and training."""
    gap = mean(course.last, "logprobs/gap", 10)
    if gap is None or gap < GAP_SUSPECT:
        return None
    advice = course.facts.advise_training(
        Edit("max_batches_offpolicy", "1", "fresher rollouts"),
        Edit("loss_fn", "ppo", "a clipped loss"),
        start_from=_newest(course),
    )
    return Finding(
        word="broken" if gap >= GAP_BROKEN else "suspect",
        evidence=f"sampling and training log-probabilities differ by {gap:.2f} nats per token",
        advice=f"{course.facts.stop()}{advice}",
    )


def _newest(course: Course) -> int | None:
    return max(course.facts.checkpoints, default=None)


def rollouts_fail(course: Course) -> Finding | None:
    """Find rollouts without a usable score, also those since the last step."""
    invalid, good = sum(values(course.last, "rollouts/invalid")), sum(values(course.last, "batch/rollouts"))
    share, recent = invalid / max(1, invalid + good), invalid_since_last_step(course)
    enough = recent[0] >= 3 * max(1, course.facts.batch_size)
    if share < 0.2 and not (enough and recent[1] >= 0.8):
        return None
    now = enough and recent[1] > share
    span = "since the last step" if now else f"of the last {min(WINDOW, len(course.last))} steps"
    return Finding(
        word="broken" if max(share, recent[1] * enough) >= 0.8 else "suspect",
        evidence=f"{recent[1] if now else share:.0%} of the rollouts {span} had no usable score" + reasons(course),
        advice=f"{course.facts.stop()}look in {course.facts.logs('env')} for what the environment raises",
    )


def invalid_since_last_step(course: Course) -> tuple[float, float]:
    """Return the rollouts without a usable score since the last step, and their share."""
    counts, trend = course.facts.counts, course.trend
    invalid = max(0.0, float(counts.get("invalid") or 0) - trend.invalid)
    good = max(0.0, float(counts.get("rollouts") or 0) - trend.rollouts)
    return invalid, invalid / max(1.0, invalid + good)


def reasons(course: Course) -> str:
    """Return why most of the rollouts had no usable score, for the end of a sentence."""
    errors = course.facts.counts.get("errors") or {}
    most = sorted(errors.items(), key=lambda item: -item[1])[:2]
    return f" ({'; '.join(f'{text}, {count} times' for text, count in most)})" if most else ""


def one_has_no_reward(course: Course) -> Finding | None:
    """Find, among several environments, one that never gave a reward above 0."""
    keys = {
        key for step in course.last[-1:] for key in step if key.startswith("environments/") and key.endswith("/reward_mean")
    }
    rewards = {key.split("/")[1]: values(course.last, key) for key in sorted(keys)}
    silent = [name for name, numbers in rewards.items() if len(numbers) >= WINDOW and not any(numbers)]
    if not silent:
        return None
    return Finding(
        word="suspect",
        evidence=f"no rollout of {', '.join(silent)} was worth more than 0 in the last {WINDOW} steps",
        advice=f"{course.facts.test(silent[0])} shows whether the model can do a little of that task",
    )


def reward_does_not_rise(course: Course) -> Finding | None:
    """Find a mean reward that has not risen since the start, as far as its noise lets one tell.

    From `LATE` of the run on, a rise that cannot be told from noise is called missing. Before that
    the steps must show that even the largest rise that agrees with them would be small at the end
    of the run.
    """
    total, trend = course.facts.total_steps, course.trend
    rise = trend.rise()
    if not total or rise is None or trend.last_step <= EARLY * total or trend.count < WINDOW or trend.risen_at is not None:
        return None
    level = statistics.fmean(trend.recent)
    if level >= SOLVED or rise.is_seen:
        return None
    largest = max(0.0, rise.largest(total))
    if trend.last_step < LATE * total and largest > LEAST_RISE * max(1.0, abs(level)):
        return None
    return Finding(
        word="not learning",
        evidence=f"the mean reward has not risen in {rise.steps} steps, now {level:.3f}: its slope is "
        f"{rise.slope * 100:+.4f} ± {rise.error * 100:.4f} per 100 steps",
        advice=f"{course.facts.report()} shows sampled rollouts; {course.facts.test()} shows whether "
        "the model reaches any reward; a run that may take off late can simply go on",
    )


def reward_falls(course: Course) -> Finding | None:
    """Find a mean reward that is far below the best that a window of this attempt had."""
    rewards, trend = values(course.last, "reward/mean"), course.trend
    if trend.best is None or len(rewards) < WINDOW:
        return None
    now = statistics.fmean(rewards)
    noise = max(statistics.pstdev(rewards) / math.sqrt(WINDOW), trend.window_error)
    chosen = math.sqrt(2 * math.log(max(2, 2 * trend.count / WINDOW)))  # of the largest of so many
    if trend.best - now <= max(0.1 * (abs(trend.best) or 1.0), (FAR + chosen) * noise):
        return None
    return Finding(
        word="suspect",
        evidence=f"the mean reward fell from {trend.best:.3f} around step {trend.best_step} to {now:.3f}",
        advice=f"{course.facts.stop()}{course.facts.advise_slower(trend.best_step)}",
    )


def _ends(points: Sequence[HeldOutPoint]) -> tuple[HeldOutPoint, HeldOutPoint] | None:
    """Return the means of the first and the last third of the held-out results."""
    if len(points) < LEAST_POINTS:
        return None
    part = max(1, len(points) // 3)
    return _joined(points[:part]), _joined(points[-part:])


def _joined(points: Sequence[HeldOutPoint]) -> HeldOutPoint:
    """Return the mean of the results. Its error is that of one result: the items are the same each
    time, so their errors do not average out."""
    return HeldOutPoint(
        step=points[-1].step,
        share=statistics.fmean(point.share for point in points),
        error=statistics.fmean(point.error for point in points),
        reward=statistics.fmean(point.reward for point in points),
        reward_error=statistics.fmean(point.reward_error for point in points),
    )


def held_out_falls(course: Course) -> Finding | None:
    """Find a held-out result that falls while the reward in training rises."""
    points = course.trend.held_out
    ends = _ends(points)
    if ends is None:
        return None
    first, last = ends
    best = max(points, key=lambda point: point.share)
    rises = last.reward - first.reward > 2 * math.hypot(first.reward_error, last.reward_error)
    falls = first.share - last.share > 1.96 * math.hypot(first.error, last.error)
    if not (rises and falls):
        return None
    return Finding(
        word="suspect",
        evidence=f"the reward in training rose from {first.reward:.3f} to {last.reward:.3f} while the "
        f"held-out result fell from {first.share:.1%} to {last.share:.1%}",
        advice=f"{course.facts.stop()}{course.facts.advise_slower(best.step)}; the best held-out "
        f"result is that of step {best.step}",
    )


def held_out_lags(course: Course) -> Finding | None:
    """Find a gap between training and held-out results that grows by more than its uncertainty."""
    points = course.trend.held_out
    ends = _ends(points)
    if ends is None or any(not 0 <= point.reward <= 1 for point in points):
        return None  # rewards of another scale than shares
    first, last = ends
    grown = (last.reward - last.share) - (first.reward - first.share)
    error = math.hypot(first.error, last.error, first.reward_error, last.reward_error)
    if last.reward <= last.share or grown <= max(GAP_GROWN, 1.96 * error):
        return None
    return Finding(
        word="suspect",
        evidence=f"the gap between training and held-out results has grown by {grown:.3f}: reward "
        f"{last.reward:.3f} in training, {last.share:.1%} of the held-out items",
        advice=f"{course.facts.report()} shows what is rewarded; more training items, or a stop at the "
        "best held-out result, help against learning the items by heart",
    )


def entropy_is_gone(course: Course) -> Finding | None:
    """Find a policy that always gives the same answers at a low reward."""
    entropy, reward = mean(course.last, "entropy/sampling", 10), mean(course.last, "reward/mean", 10)
    if entropy is None or reward is None or entropy >= 0.01 or reward >= 0.5:
        return None
    return Finding(
        word="suspect",
        evidence=f"the policy's entropy is {entropy:.4f} nats per token at a mean reward of {reward:.3f}: it tries nothing new",
        advice=f"{course.facts.stop()}{course.facts.advise_slower(course.trend.best_step)}",
    )


def length_drifts(course: Course) -> Finding | None:
    """Find completions that became much longer or shorter."""
    first, last = mean(course.first, "length/mean"), mean(course.last, "length/mean")
    if len(course.last) < 2 * WINDOW or not first or not last or first / 3 < last < 3 * first:
        return None
    return Finding(
        word="suspect",
        evidence=f"completions went from {first:.0f} to {last:.0f} tokens",
        advice=f"{course.facts.report()} shows sampled rollouts: see whether the reward favours their length",
    )


def cut_off(course: Course) -> Finding | None:
    """Find completions that the limit of tokens cuts off."""
    share, limit = mean(course.last, "rollouts/truncated_share", 5), course.facts.max_token_length
    if share is None or share < 0.5:
        return None
    facts = course.facts
    if limit is None or "max_token_length" not in facts.tunable:
        advice = f"{facts.report()} shows sampled rollouts; ask for shorter answers in the prompt"
    else:
        longer = facts.train(f"max_token_length={2 * limit}")
        advice = f"{longer} allows longer answers; or ask for shorter ones in the prompt"
    return Finding(
        word="suspect",
        evidence=f"{share:.0%} of the completions are cut off at their limit of tokens",
        advice=advice,
    )


SIGNS: tuple[Callable[[Course], Finding | None], ...] = (
    weights_stay,
    loss_is_not_a_number,
    no_signal,
    nothing_is_sent,
    sampler_and_trainer_disagree,
    rollouts_fail,
    one_has_no_reward,
    reward_falls,
    held_out_falls,
    held_out_lags,
    reward_does_not_rise,
    entropy_is_gone,
    length_drifts,
    cut_off,
)
