"""Log-probabilities for groups that come without them: most environments written for Atropos send
tokens and masks alone.

They are those of the weights that sample now, where the ratio of the loss wants those of the
weights that sampled then. A batch that did not wait (`max_batches_offpolicy` of 1) was sampled by
the same weights, or by those of one update before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tinker

from lachesis.base.arrays import Array
from lachesis.rollout_api.scored_group import find_fault
from lachesis.trainer.batch import IGNORE_INDEX, BatchSettings
from lachesis.trainer.doubled_eos import build_keep_mask

UNSAMPLED_LOGPROB = 1.0
"""What Atropos writes at tokens that nobody has sampled."""


@dataclass
class RecomputedLogprobs:
    """How many rollouts the model was asked about, and their tokens; and by its number the reason
    of each group whose tokens the server has refused.
    """

    num_rollouts: int = 0
    num_tokens: int = 0
    refusal_reasons: dict[int, str] = field(default_factory=dict)


async def fill_missing_logprobs(
    groups_P: Sequence[Any], sampler: tinker.SamplingClient | None, settings: BatchSettings
) -> RecomputedLogprobs:
    """Ask the model for the log-probabilities that are missing, and write them into the groups.

    Groups that teach nothing, groups that cannot be trained on, and rollouts that are too long are
    not asked about. Raises what the server raises when it fails.
    """
    recomputed = RecomputedLogprobs()
    if sampler is None:
        return recomputed
    for group_index, group in enumerate(groups_P):
        if (
            find_fault(group)
            or group.get("inference_logprobs")
            or not _is_trainable(group, settings)
        ):
            continue
        rollouts = list(zip(group["tokens"], group["masks"], strict=True))
        try:
            group["inference_logprobs"] = await asyncio.gather(
                *(_compute_rollout_logprobs(sampler, *rollout, settings) for rollout in rollouts)
            )
        except (tinker.RequestFailedError, OverflowError, TypeError, ValueError) as error:
            recomputed.refusal_reasons[group_index] = (
                f"the model gave no log-probabilities: {error}"
            )
            continue
        lengths = [
            len(tokens) for tokens in group["tokens"] if 1 < len(tokens) <= settings.max_tokens
        ]
        recomputed.num_rollouts += len(lengths)
        recomputed.num_tokens += sum(lengths)
    return recomputed


def _is_trainable(group: dict[str, Any], settings: BatchSettings) -> bool:
    """Return whether `to_batch` may make datums of the group."""
    return (
        settings.has_kl_penalty
        or bool(group.get("distill_token_ids"))
        or len(set(map(float, group["scores"]))) > 1
    )


async def _compute_rollout_logprobs(
    sampler: tinker.SamplingClient,
    tokens: Sequence[int],
    masks: Sequence[int],
    settings: BatchSettings,
) -> Array:
    """Return one value per token of a rollout, from the context that training has."""
    tokens_T, loss_mask_T = (
        np.asarray(tokens, np.int64),
        np.asarray(masks, np.int64) != IGNORE_INDEX,
    )
    logprobs_T = np.where(loss_mask_T, 0.0, UNSAMPLED_LOGPROB)
    keep_mask_T = build_keep_mask(tokens_T, settings.eos_id, loss_mask_T)
    if len(tokens_T) > settings.max_tokens or keep_mask_T.sum() < 2:
        return logprobs_T  # it is left out, whatever stands here
    logprobs = await sampler.compute_logprobs_async(
        tinker.ModelInput.from_ints(tokens_T[keep_mask_T].tolist())
    )
    logprobs_T[keep_mask_T] = [min(0.0, float(value or 0.0)) for value in logprobs]
    return np.where(loss_mask_T, logprobs_T, UNSAMPLED_LOGPROB)
