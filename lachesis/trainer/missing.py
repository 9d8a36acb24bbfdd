"""Log-probabilities for groups that come without them: most environments written for Atropos send tokens and masks alone.

They are those of the weights that sample now, where the ratio of the loss wants those of the weights that sampled then. A batch
that did not wait (`max_batches_offpolicy` of 1) was sampled by the same weights, or by those of one update before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import tinker

from lachesis.errors import BatchError
from lachesis.trainer.batch import IGNORED

NOT_SAMPLED = 1.0
"""What Atropos writes at tokens that nobody has sampled."""


async def fill(groups_P: Sequence[Any], sampler: tinker.SamplingClient | None, most_tokens: int) -> tuple[int, int]:
    """Ask the model for what is missing, but for groups that teach nothing and rollouts that are too long; how many rollouts,
    and their tokens. Raises BatchError for tokens that cannot be asked about, and what the server raises."""
    wanting = [group for group in groups_P if group.get("tokens") and not group.get("inference_logprobs")]
    wanting = [group for group in wanting if len(set(map(float, group["scores"]))) > 1]
    if not wanting or sampler is None:
        return 0, 0
    asked = [tokens for group in wanting for tokens in group["tokens"] if 1 < len(tokens) <= most_tokens]
    for group in wanting:
        group["inference_logprobs"] = await asyncio.gather(
            *(_of(sampler, group, index, most_tokens) for index in range(len(group["tokens"])))
        )
    return len(asked), sum(map(len, asked))


async def _of(sampler: tinker.SamplingClient, group: Mapping[str, Any], index: int, most_tokens: int) -> list[float]:
    tokens, masks = group["tokens"][index], group["masks"][index]
    if len(masks) != len(tokens):
        raise BatchError(
            f"rollout {index} of a group has {len(tokens)} tokens and {len(masks)} masks; the two must have one length"
        )
    if not 1 < len(tokens) <= most_tokens:
        return [NOT_SAMPLED if mask == IGNORED else 0.0 for mask in masks]  # it is left out, whatever stands here
    found = await sampler.compute_logprobs_async(tinker.ModelInput.from_ints(list(tokens)))
    return [
        NOT_SAMPLED if mask == IGNORED or value is None else min(0.0, float(value))
        for mask, value in zip(masks, found, strict=True)
    ]
