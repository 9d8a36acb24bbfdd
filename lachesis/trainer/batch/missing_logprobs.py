"""Compute log-probabilities for groups without them.

Most environments written for Atropos send tokens and masks only. The computed values are those of
the current sampling weights, where the loss needs those of the weights that sampled the tokens.
With `max_batches_offpolicy` of 1 these are the same, or one update older.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tinker

from lachesis.base.arrays import Array
from lachesis.base.tinker_client import call_sdk
from lachesis.rollout_api.scored_group import build_keep_mask, find_fault
from lachesis.tinker_conformance.answer_shape import check_prompt_logprobs
from lachesis.trainer.batch.group_to_datums import IGNORE_INDEX, BatchSettings

# What Atropos writes for tokens that were not sampled.
UNSAMPLED_LOGPROB = 1.0


@dataclass
class RecomputedLogprobs:
    """Hold how many rollouts and tokens were computed, and why some groups were refused."""

    num_rollouts: int = 0
    num_tokens: int = 0
    refusal_reasons: dict[int, str] = field(default_factory=dict)


async def fill_missing_logprobs(
    groups_P: Sequence[Any], sampler: tinker.SamplingClient | None, settings: BatchSettings
) -> RecomputedLogprobs:
    """Compute the missing log-probabilities and write them into the groups.

    Groups without advantages, groups that cannot be trained on, and rollouts that are too long are
    skipped.

    Raises:
        Exception: The server failed.
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
                f"the server computed no log-probabilities: {error}"
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
    """Return one value per token of a rollout, computed in the context that training uses."""
    tokens_T, loss_mask_T = (
        np.asarray(tokens, np.int64),
        np.asarray(masks, np.int64) != IGNORE_INDEX,
    )
    logprobs_T = np.where(loss_mask_T, 0.0, UNSAMPLED_LOGPROB)
    keep_mask_T = build_keep_mask(tokens_T, settings.eos_id, loss_mask_T)
    if len(tokens_T) > settings.max_tokens or keep_mask_T.sum() < 2:
        return logprobs_T  # The rollout will be dropped, so the values do not matter.
    prompt = tinker.ModelInput.from_ints(tokens_T[keep_mask_T].tolist())
    logprobs = await call_sdk(sampler, "compute_logprobs", prompt)
    check_prompt_logprobs(logprobs, prompt.length)
    logprobs_T[keep_mask_T] = [min(0.0, float(value or 0.0)) for value in logprobs]
    return np.where(loss_mask_T, logprobs_T, UNSAMPLED_LOGPROB)
