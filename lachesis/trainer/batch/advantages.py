"""Compute advantages, sequence weights and learning rates; pure functions on numpy arrays.

The suffixes of names are those of `lachesis.trainer.batch.group_to_datums`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from lachesis.base.arrays import Array
from lachesis.base.errors import BatchError
from lachesis.rollout_api.scored_group import MIN_LOGPROB

AdvantageEstimator = Literal["mean", "mean_std", "leave_one_out"]
LearningRateSchedule = Literal["constant", "linear", "cosine"]
STD_EPSILON = 1e-6


def compute_advantages(scores_G: Array, estimator: AdvantageEstimator) -> Array:
    """Return the advantages (G,) of the G rollouts of one prompt.

    mean           s - mean(s); Liu et al. 2025, arXiv:2503.20783 (GRPO without the division)
    mean_std       (s - mean(s)) / (std(s) + 1e-6), std of the population; Shao et al. 2024,
                   arXiv:2402.03300, section 4.1.2
    leave_one_out  s_i - mean of the others, which is G / (G - 1) times `mean`; Ahmadian et al.
                   2024, arXiv:2402.14740, eq. 6
    """
    advantages_G: Array = scores_G - scores_G.mean()
    if estimator == "mean_std":
        advantages_G = advantages_G / (scores_G.std() + STD_EPSILON)
    if estimator == "leave_one_out" and len(scores_G) > 1:
        advantages_G = advantages_G * (len(scores_G) / (len(scores_G) - 1))
    return advantages_G


def compute_sequence_weights(lengths_D: Sequence[int]) -> Array:
    """Return factors (D,) that make each rollout of a batch count the same: mean length / own
    length.

    With these factors the loss is weighted as in GRPO (Shao et al. 2024, eq. 3: 1/|o_i|). Without
    them each token counts the same, as in DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 8).
    """
    lengths = np.asarray(lengths_D, np.float64)
    factors: Array = lengths.mean() / lengths
    return factors


def compute_learning_rate(
    peak: float, step: int, total_steps: int, *, schedule: LearningRateSchedule, warmup_steps: int
) -> float:
    """Return the learning rate of step number `step`, counted from 0.

    It rises linearly over `warmup_steps` to `peak`. Then it is constant, falls linearly, or falls
    as a half cosine (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5) to zero at `total_steps`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "linear":
        return peak * (1 - decay_progress)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * decay_progress))
    return peak


def compute_distillation_advantages(
    rollout_label: str,
    group: Mapping[str, Any],
    index: int,
    tokens_T: Array,
    loss_mask_T: Array,
    logprobs_T: Array,
) -> Array:
    """Return teacher log-probability minus student log-probability of each sampled token.

    `distill_logprobs` has the shape (rollout, token, K), aligned with the tokens; K must be 1 and
    be the sampled token.

    Raises:
        BatchError: The shapes do not fit, or the teacher's values are not usable.
    """
    teacher_token_ids = np.asarray(group["distill_token_ids"][index])
    teacher_logprobs = np.asarray(group["distill_logprobs"][index], dtype=np.float64)
    if (
        teacher_token_ids.ndim != 2
        or teacher_token_ids.shape != teacher_logprobs.shape
        or teacher_token_ids.shape[1] != 1
        or len(teacher_token_ids) != len(tokens_T)
    ):
        raise BatchError(
            f"{rollout_label}: distill_token_ids has shape {teacher_token_ids.shape}, "
            f"distill_logprobs {teacher_logprobs.shape}; only ({len(tokens_T)}, 1) can be trained "
            "through the Tinker API (K = 1, one entry per token)"
        )
    if (teacher_token_ids[loss_mask_T, 0] != tokens_T[loss_mask_T]).any():
        raise BatchError(
            f"{rollout_label}: distill_token_ids names other tokens than those that were sampled"
        )
    advantages_T = np.where(loss_mask_T, teacher_logprobs[:, 0] - logprobs_T, 0.0)
    if not (np.abs(advantages_T[1:]) < -MIN_LOGPROB).all():
        raise BatchError(
            f"{rollout_label}: distill_logprobs of trained tokens are not finite, or below "
            f"{MIN_LOGPROB:g}"
        )
    return advantages_T
