"""Log-probabilities for groups that come without them: most environments written for Atropos send tokens and masks alone.

They are those of the weights that sample now, where the ratio of the loss wants those of the weights that sampled then. A batch
that did not wait (`max_batches_offpolicy` of 1) was sampled by the same weights, or by those of one update before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tinker

from lachesis.rollout_api.scored_group import find_fault
from lachesis.trainer.batch import IGNORED, Array, Recipe
from lachesis.trainer.doubled_eos import find_kept

NOT_SAMPLED = 1.0
"""What Atropos writes at tokens that nobody has sampled."""


@dataclass
class Filled:
    """How many rollouts the model was asked about, and their tokens; and by its number the reason of each group whose
    tokens the server has refused."""

    rollouts: int = 0
    tokens: int = 0
    refused: dict[int, str] = field(default_factory=dict)


async def fill(groups_P: Sequence[Any], sampler: tinker.SamplingClient | None, recipe: Recipe) -> Filled:
    """Ask the model for the log-probabilities that are missing, and write them into the groups.

    Groups that teach nothing, groups that cannot be trained on, and rollouts that are too long are not asked about. Raises what
    the server raises when it fails.
    """
    filled = Filled()
    if sampler is None:
        return filled
    for number, group in enumerate(groups_P):
        if find_fault(group) or group.get("inference_logprobs") or not _teaches(group, recipe):
            continue
        rollouts = list(zip(group["tokens"], group["masks"], strict=True))
        try:
            group["inference_logprobs"] = await asyncio.gather(*(_ask(sampler, *rollout, recipe) for rollout in rollouts))
        except (tinker.RequestFailedError, OverflowError, TypeError, ValueError) as error:
            filled.refused[number] = f"the model gave no log-probabilities: {error}"
            continue
        lengths = [len(tokens) for tokens in group["tokens"] if 1 < len(tokens) <= recipe.max_tokens]
        filled.rollouts += len(lengths)
        filled.tokens += sum(lengths)
    return filled


def _teaches(group: dict[str, Any], recipe: Recipe) -> bool:
    """Return whether `to_batch` may make datums of the group."""
    return recipe.penalised or bool(group.get("distill_token_ids")) or len(set(map(float, group["scores"]))) > 1


async def _ask(sampler: tinker.SamplingClient, tokens: Sequence[int], masks: Sequence[int], recipe: Recipe) -> Array:
    """Return one value per token of a rollout, from the context that training has."""
    tokens_T, trained_T = np.asarray(tokens, np.int64), np.asarray(masks, np.int64) != IGNORED
    logprobs_T = np.where(trained_T, 0.0, NOT_SAMPLED)
    keep_T = find_kept(tokens_T, recipe.eos_id, trained_T)
    if len(tokens_T) > recipe.max_tokens or keep_T.sum() < 2:
        return logprobs_T  # it is left out, whatever stands here
    values = await sampler.compute_logprobs_async(tinker.ModelInput.from_ints(tokens_T[keep_T].tolist()))
    logprobs_T[keep_T] = [min(0.0, float(value or 0.0)) for value in values]
    return np.where(trained_T, logprobs_T, NOT_SAMPLED)
