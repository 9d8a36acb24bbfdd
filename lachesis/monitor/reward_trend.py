"""Keep running sums over the steps of a run, and test whether its mean reward rises.

A run may have thousands of steps, so only new ones are read: the sums are kept in `monitor.json`
and have a fixed size. Rewards of successive steps are correlated (the policy, and often the items,
change slowly), so the standard error of an ordinary regression would be too small. The test
therefore uses batch means: the steps are divided into at most `MAX_BLOCKS` equal blocks, and the
uncertainty is estimated from the differences between blocks (Law 2015, Simulation Modeling and
Analysis, section 9.5.3).
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

Step = dict[str, Any]
# Steps of the windows at the start, at the end, and of the best mean reward.
WINDOW = 20
# Number of blocks at which neighbouring blocks are merged.
MAX_BLOCKS = 64
MAX_BINS, MIN_BINS, MIN_BIN_STEPS = 16, 4, 5
# Held-out results that are kept; beyond that, every second one is removed.
MAX_HELD_OUT_POINTS = 64
# The 97.5 % quantile of the normal distribution.
NORMAL_QUANTILE = 1.96
# Standard errors between the first and the last steps from which a rise is significant, and from
# which it remains certain for the rest of the run. The first is above `NORMAL_QUANTILE`, because
# the noise of a window of few steps is known less exactly.
MIN_CONTRAST, MIN_CERTAIN_CONTRAST = 3.0, 6.0
MIN_CERTAIN_STEPS = 3 * WINDOW
# Steps per part when noise is estimated: long enough that parts are nearly independent, and short
# enough that learning changes little within one.
NOISE_PART_STEPS = 5


class HeldOutTrendPoint(BaseModel):
    """Hold one held-out result and the training reward at that time."""

    step: int
    """Step of the evaluated weights."""
    share: float
    """Share of the held-out items that were answered correctly, from 0 to 1."""
    error: float
    """Standard error of the share."""
    reward: float
    """Mean training reward over the last `WINDOW` steps."""
    reward_error: float


@dataclass(frozen=True)
class RewardRise:
    """How the mean reward has changed since the first step."""

    steps: int
    slope: float
    """Change of the mean reward per step."""
    standard_error: float
    """Standard error of the slope."""
    t_quantile: float
    """The 97.5 % quantile of Student's t: how many standard errors the slope must be above 0."""
    contrast: float
    """Mean of the last third minus the mean of the first `WINDOW` steps, in standard errors."""

    @property
    def is_significant(self) -> bool:
        """Return whether the slope, or a rise that ended earlier, is more than noise."""
        return self.slope > self.t_quantile * self.standard_error or self.contrast > MIN_CONTRAST

    @property
    def is_certain(self) -> bool:
        """Return whether the rise is significant even though it is tested at many steps."""
        if self.steps < MIN_CERTAIN_STEPS:
            return False
        return (
            self.slope > 2 * self.t_quantile * self.standard_error
            or self.contrast > MIN_CERTAIN_CONTRAST
        )

    def compute_max_rise(self, steps: int) -> float:
        """Return the largest rise over this many steps that is consistent with the measurements."""
        return (self.slope + self.t_quantile * self.standard_error) * steps


class Trend(BaseModel):
    """Sums over all steps of a run, in a fixed size."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    position: int = 0
    """Bytes of the metrics file that were read so far."""
    last_step: int = 0
    block_steps: int = 1
    """Steps per block."""
    blocks: list[tuple[int, float, float]] = []
    """Per block of successive steps: the number of steps, the sum of the step numbers, and the sum
    of their rewards.
    """
    first_rewards: list[float] = []
    """Rewards of the first `WINDOW` steps."""
    recent_rewards: list[float] = []
    """Rewards of the last `WINDOW` steps."""
    best: float | None = None
    """Highest mean reward of a window."""
    best_step: int = 0
    """Last step of that window."""
    noise_sum: float = 0.0
    """Sum of the squared differences between the means of successive parts."""
    noise_differences: int = 0
    """Number of those differences."""
    last_part_mean: float | None = None
    """Mean reward of the newest part."""
    peak_rate: float = 0.0
    """Highest learning rate of an update."""
    zero_signal_steps: int = 0
    """Steps without a gradient since the last step that had one."""
    zero_signal_rollouts: int = 0
    rollouts: int = 0
    """Rollouts that this attempt has trained on or dropped."""
    invalid: int = 0
    """Rollouts without a usable score that the steps of this attempt have counted."""
    raised: int | None = None
    """Groups in whose scoring the environment raised, counted likewise; None in sums that an older
    release has begun, which did not count them.
    """
    risen_at: int | None = None
    """The step at which it became certain that the reward had risen."""
    held_out: list[HeldOutTrendPoint] = []

    def add(self, steps: Iterable[Step], *, since: float = 0.0) -> None:
        """Add the metrics of new steps, in order, to the sums of the trend.

        Args:
            steps: Metrics of the new steps.
            since: Unix time at which this attempt started; earlier steps belong to another attempt.
        """
        if self.last_step == 0:
            self.raised = 0
        for step in steps:
            self.last_step = step["step"]
            self.peak_rate = max(self.peak_rate, step.get("train/learning_rate") or 0.0)
            if (step.get("time") or math.inf) >= since:
                self.rollouts += int(step.get("batch/rollouts") or 0)
                self.invalid += int(step.get("rollouts/invalid") or 0)
                if self.raised is not None:
                    self.raised += int(step.get("rollouts/raised") or 0)
            self._count_zero_signal(step)
            if step.get("reward/mean") is not None:
                self._add_reward(step["step"], step["reward/mean"])
            self._add_held_out(step)
        rise = self.estimate_rise()
        if rise is not None and self.risen_at is None and rise.is_certain:
            self.risen_at = self.last_step

    def _count_zero_signal(self, step: Step) -> None:
        if step.get("batch/zero_signal_share") == 1.0:
            self.zero_signal_steps += 1
            self.zero_signal_rollouts += int(step.get("batch/rollouts") or 0)
        else:
            self.zero_signal_steps = self.zero_signal_rollouts = 0

    def _add_reward(self, step: int, reward: float) -> None:
        """Add a reward to the blocks of sums, which are merged in pairs when there are too many."""
        if len(self.first_rewards) < WINDOW:
            self.first_rewards.append(reward)
        self.recent_rewards = [*self.recent_rewards[-(WINDOW - 1) :], reward]
        count, steps, rewards = self.blocks[-1] if self.blocks else (self.block_steps, 0.0, 0.0)
        if count < self.block_steps:
            self.blocks[-1] = (count + 1, steps + step, rewards + reward)
        else:
            self.blocks.append((1, float(step), reward))
        if len(self.blocks) >= MAX_BLOCKS and self.blocks[-1][0] == self.block_steps:
            self.blocks = [
                _merge_blocks(self.blocks[start : start + 2])
                for start in range(0, len(self.blocks), 2)
            ]
            self.block_steps *= 2
        self._update_noise_and_best(step)

    def _update_noise_and_best(self, step: int) -> None:
        """Update the noise after each part, and the best window after each half window."""
        count = self.num_steps
        if count % NOISE_PART_STEPS == 0:
            part = statistics.fmean(self.recent_rewards[-NOISE_PART_STEPS:])
            if self.last_part_mean is not None:
                self.noise_sum += (part - self.last_part_mean) ** 2
                self.noise_differences += 1
            self.last_part_mean = part
        if count >= WINDOW and count % (WINDOW // 2) == 0:
            mean = statistics.fmean(self.recent_rewards)
            if self.best is None or mean > self.best:
                self.best, self.best_step = mean, step

    def _add_held_out(self, step: Step) -> None:
        """Add a held-out result with the mean reward of its time."""
        share, low, high = (step.get(f"eval/{name}") for name in ("percent_correct", "low", "high"))
        if share is None or low is None or high is None or not self.recent_rewards:
            return
        evaluated_step = step.get("eval/step")
        point = HeldOutTrendPoint(
            step=int(step["step"] if evaluated_step is None else evaluated_step),
            share=share,
            error=max((high - low) / (2 * 1.96), 1e-6),
            reward=statistics.fmean(self.recent_rewards),
            reward_error=max(
                statistics.pstdev(self.recent_rewards) / math.sqrt(len(self.recent_rewards)),
                self.window_standard_error,
            ),
        )
        self.held_out.append(point)
        if len(self.held_out) > MAX_HELD_OUT_POINTS:
            self.held_out = self.held_out[::2]

    @property
    def num_steps(self) -> int:
        """Return the number of steps with a reward."""
        if self.blocks:
            return (len(self.blocks) - 1) * self.block_steps + self.blocks[-1][0]
        return 0

    @property
    def window_standard_error(self) -> float:
        """Return the standard error of a window's mean reward, from how successive parts differ."""
        if self.noise_differences:
            return math.sqrt(
                self.noise_sum / (2 * self.noise_differences) * NOISE_PART_STEPS / WINDOW
            )
        return 0.0

    def estimate_rise(self) -> RewardRise | None:
        """Return how the reward has changed, or None while there are too few steps."""
        bins = self._gather_bins()
        if len(bins) < MIN_BINS:
            return None
        times, means = [bin[1] / bin[0] for bin in bins], [bin[2] / bin[0] for bin in bins]
        slope, error = _fit_line(times, means)
        steps_per_bin = self.num_steps / len(bins)
        bin_variance = (
            statistics.fmean((after - before) ** 2 for before, after in itertools.pairwise(means))
            / 2
        )
        last_third = _merge_blocks(bins[-max(1, len(bins) // 3) :])
        difference = last_third[2] / last_third[0] - statistics.fmean(self.first_rewards)
        contrast_error = math.sqrt(
            max(bin_variance * steps_per_bin, 1e-12)
            * (1 / last_third[0] + 1 / len(self.first_rewards))
        )
        return RewardRise(
            self.num_steps,
            slope,
            error,
            _compute_t_quantile(len(bins) - 2),
            difference / contrast_error,
        )

    def _gather_bins(self) -> list[tuple[int, float, float]]:
        """Merge the blocks into fewer parts of about equal length."""
        parts = min(MAX_BINS, len(self.blocks), self.num_steps // MIN_BIN_STEPS)
        if not parts:
            return []
        bounds = [round(part * len(self.blocks) / parts) for part in range(parts + 1)]
        return [_merge_blocks(self.blocks[start:end]) for start, end in itertools.pairwise(bounds)]


def _merge_blocks(blocks: Sequence[tuple[int, float, float]]) -> tuple[int, float, float]:
    return (
        sum(block[0] for block in blocks),
        math.fsum(block[1] for block in blocks),
        math.fsum(block[2] for block in blocks),
    )


def _fit_line(times: Sequence[float], means: Sequence[float]) -> tuple[float, float]:
    """Return the slope of the regression of means on times, and its standard error."""
    slope, intercept = statistics.linear_regression(times, means)
    residual = math.fsum(
        (mean - intercept - slope * time) ** 2 for time, mean in zip(times, means, strict=True)
    )
    centre = statistics.fmean(times)
    spread = math.fsum((time - centre) ** 2 for time in times)
    return slope, max(math.sqrt(residual / (len(times) - 2) / spread), 1e-12)


def _compute_t_quantile(degrees_of_freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t (Abramowitz and Stegun 1964, 26.7.5)."""
    z = NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return (
        z
        + first / degrees_of_freedom
        + second / degrees_of_freedom**2
        + third / degrees_of_freedom**3
    )
