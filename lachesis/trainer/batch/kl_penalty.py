"""Compute the penalty on the distance to the base model, and add it to the advantages of a batch.

The suffixes of names are those of `lachesis.trainer.batch.group_to_datums`.
"""

from collections.abc import Sequence

import numpy as np

from lachesis.base.arrays import Array
from lachesis.trainer.batch.group_to_datums import Batch, BatchSettings, apply_loss_aggregation


def compute_kl_penalties(
    sampling_logprobs_D: Sequence[Array], base_logprobs_D: Sequence[Array], coefficient: float
) -> tuple[list[Array], float]:
    """Return the penalties to add to the advantages of each datum's trained tokens, and the mean KL
    divergence.

    The divergence is the mean of lp - lp_base over all tokens: the estimate k1 of KL(policy ||
    base) on the policy's own samples, in nats per token (Schulman 2020,
    joschu.net/blog/kl-approx.html). The penalty is that on the reward, -coefficient (lp - lp_base)
    per token (Ouyang et al. 2022, arXiv:2203.02155, eq. 2), with the mean over the batch as
    baseline, so that the penalties add up to zero.
    """
    log_ratios_D = [
        sampling - base for sampling, base in zip(sampling_logprobs_D, base_logprobs_D, strict=True)
    ]
    mean_log_ratio = float(np.concatenate(log_ratios_D).mean())
    return [
        -coefficient * (log_ratios - mean_log_ratio) for log_ratios in log_ratios_D
    ], mean_log_ratio


def add_kl_penalty(
    batch: Batch, base_logprobs_D: Sequence[Array], coefficient: float, settings: BatchSettings
) -> float:
    """Add the KL penalty to the advantages of all trained tokens, then weight the rollouts.

    Rollouts without any advantage after that are dropped.

    Args:
        batch: The batch, which is changed.
        base_logprobs_D: The base model's log-probabilities of each datum's trained tokens.
        coefficient: The weight of the penalty.
        settings: How rollouts are weighted.

    Returns:
        The estimate of KL(policy || base) in nats per token.
    """
    sampling_logprobs_D = [
        datum.logprobs[datum.loss_mask].astype(np.float64) for datum in batch.datums
    ]
    penalties_D, mean_kl = compute_kl_penalties(sampling_logprobs_D, base_logprobs_D, coefficient)
    for datum, penalty in zip(batch.datums, penalties_D, strict=True):
        datum.advantages[datum.loss_mask] += penalty.astype(np.float32)
    batch.datums = [datum for datum in batch.datums if datum.advantages.any()]
    apply_loss_aggregation(batch, settings)
    return mean_kl
