"""Environments that send no log-probabilities: the model is asked for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lachesis.errors import BatchError
from lachesis.trainer.batch import Recipe, to_batch
from lachesis.trainer.missing import fill
from lachesis.trainer.policy import Policy

RECIPE = Recipe(max_tokens=8, eos_id=None)


def group(*tokens: list[int], **changes: Any) -> dict[str, Any]:
    masks = [[-100, *one[1:]] for one in tokens]
    return {"tokens": list(tokens), "masks": masks, "scores": [float(index) for index in range(len(tokens))], **changes}


async def test_they_are_those_of_the_model_that_samples(policy: Policy) -> None:
    wanting, whole, equal = group([2, 3, 4], [2, 5, 6, 7]), group([2, 3], [2, 4]), group([2, 3], [2, 4], scores=[1.0, 1.0])
    whole["inference_logprobs"] = [[1.0, -0.5], [1.0, -0.25]]
    groups = [wanting, whole, equal]
    assert await fill(groups, policy.sampler, RECIPE.max_tokens) == (2, 7)
    assert "inference_logprobs" not in equal, "it teaches nothing"
    assert whole["inference_logprobs"] == [[1.0, -0.5], [1.0, -0.25]]
    batch = to_batch(groups, RECIPE)
    for datum, tokens in zip(batch.datums[:2], wanting["tokens"], strict=True):
        np.testing.assert_allclose(datum.logprobs, await policy.logprobs(tokens), atol=1e-5)
    assert batch.zero_signal_groups == 1


async def test_what_is_left_out_is_not_asked_about(policy: Policy) -> None:
    wanting = group(list(range(2, 20)), [2, 3], [5], scores=[0.0, 5.0, 1.0])
    assert await fill([wanting, group()], policy.sampler, RECIPE.max_tokens) == (1, 2)
    batch = to_batch([wanting], RECIPE)
    assert (len(batch.datums), batch.too_long) == (1, 1)


async def test_masks_that_do_not_fit_are_named(policy: Policy) -> None:
    with pytest.raises(BatchError, match="rollout 1 of a group has 3 tokens and 1 masks"):
        await fill([group([2, 3], [2, 3, 4], masks=[[-100, 3], [-100]])], policy.sampler, RECIPE.max_tokens)
