"""What a rollout is worth beside the others of its group, and how it counts; pure functions on
numpy arrays. Suffixes as in `batch`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from lachesis.base.arrays import Array

AdvantageEstimator = Literal["mean", "mean_std", "leave_one_out"]
LearningRateSchedule = Literal["constant", "linear", "cosine"]
STD_EPSILON = 1e-6


def compute_advantages(scores_G: Array, estimator: AdvantageEstimator) -> Array:
    """Advantages (G,) of the G rollouts of one prompt.

    mean           s - mean(s)                        Liu et al. 2025, arXiv:2503.20783 (GRPO
    without the division) mean_std       (s - mean(s)) / (std(s) + 1e-6)    Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2; std of the population leave_one_out  s_i - mean of the others
    Ahmadian et al. 2024, arXiv:2402.14740, eq. 6; G / (G - 1) times `mean`
    """
    advantages_G: Array = scores_G - scores_G.mean()
    if estimator == "mean_std":
        advantages_G = advantages_G / (scores_G.std() + STD_EPSILON)
    if estimator == "leave_one_out" and len(scores_G) > 1:
        advantages_G = advantages_G * (len(scores_G) / (len(scores_G) - 1))
    return advantages_G


def compute_sequence_weights(lengths_D: Sequence[int]) -> Array:
    """Factors (D,) that make each rollout of a batch count the same, whatever its length: mean
    length / own length. Without them each token counts the same. The first is the weighting of GRPO
    (Shao et al. 2024, eq. 3: 1/|o_i|), the second that of DAPO (Yu et al. 2025, arXiv:2503.14476,
    eq. 8).
    """
    lengths = np.asarray(lengths_D, np.float64)
    factors: Array = lengths.mean() / lengths
    return factors


def compute_kl_penalties(
    sampling_logprobs_D: Sequence[Array], base_logprobs_D: Sequence[Array], coefficient: float
) -> tuple[list[Array], float]:
    """What is added to the advantages of the trained tokens, per datum, so that training stays near
    the base model; and the mean of lp - lp_base over all of them: the estimate k1 of KL(policy ||
    base) on the policy's own samples, in nats per token (Schulman 2020,
    joschu.net/blog/kl-approx.html).

    The penalty is that of the reward, -coefficient (lp - lp_base) per token (Ouyang et al. 2022,
    arXiv:2203.02155, eq. 2), with the mean over the batch as baseline, so that it adds up to zero.
    """
    log_ratios_D = [
        sampling - base for sampling, base in zip(sampling_logprobs_D, base_logprobs_D, strict=True)
    ]
    mean_log_ratio = float(np.concatenate(log_ratios_D).mean())
    return [
        -coefficient * (log_ratios - mean_log_ratio) for log_ratios in log_ratios_D
    ], mean_log_ratio


def compute_learning_rate(
    peak: float, step: int, total_steps: int, *, schedule: LearningRateSchedule, warmup_steps: int
) -> float:
    """Of step number `step`, from 0. It rises in equal parts over `warmup` steps to `peak`, then
    stays, falls in equal parts, or as a half cosine (Loshchilov & Hutter 2017, arXiv:1608.03983,
    eq. 5) towards zero, which it would reach at `total`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "linear":
        return peak * (1 - decay_progress)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * decay_progress))
    return peak
