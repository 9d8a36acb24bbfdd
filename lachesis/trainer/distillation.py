"""Turn a teacher's log-probabilities into advantages for on-policy distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lachesis.base.arrays import Array
from lachesis.base.errors import BatchError
from lachesis.rollout_api.scored_group import MIN_LOGPROB


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
