"""Environments that send no log-probabilities: the model is asked for them."""

from dataclasses import replace

import numpy as np

from lachesis.trainer.batch.group_to_datums import BatchSettings, to_batch
from lachesis.trainer.batch.missing_logprobs import RecomputedLogprobs, fill_missing_logprobs

RECIPE = BatchSettings(max_tokens=8, eos_id=None)


def group(*tokens, **changes):
    masks = [[-100, *token[1:]] for token in tokens]
    return {
        "tokens": list(tokens),
        "masks": masks,
        "scores": [float(index) for index in range(len(tokens))],
        **changes,
    }


async def test_they_are_those_of_the_model_that_samples(policy):
    wanting, whole, equal = (
        group([2, 3, 4], [2, 5, 6, 7]),
        group([2, 3], [2, 4]),
        group([2, 3], [2, 4], scores=[1.0, 1.0]),
    )
    whole["inference_logprobs"] = [[1.0, -0.5], [1.0, -0.25]]
    groups = [wanting, whole, equal]
    assert await fill_missing_logprobs(groups, policy.sampler, RECIPE) == RecomputedLogprobs(2, 7)
    assert "inference_logprobs" not in equal, "it teaches nothing"
    assert whole["inference_logprobs"] == [[1.0, -0.5], [1.0, -0.25]]
    batch = to_batch(groups, RECIPE)
    for datum, tokens in zip(batch.datums[:2], wanting["tokens"], strict=True):
        np.testing.assert_allclose(datum.logprobs, await policy.compute_logprobs(tokens), atol=1e-5)
    assert batch.zero_signal_groups == 1


async def test_what_is_left_out_is_not_asked_about(policy):
    wanting = group(list(range(2, 20)), [2, 3], [5], scores=[0.0, 5.0, 1.0])
    assert await fill_missing_logprobs(
        [wanting, group()], policy.sampler, RECIPE
    ) == RecomputedLogprobs(1, 2)
    batch = to_batch([wanting], RECIPE)
    assert (len(batch.datums), batch.num_too_long) == (1, 1)


async def test_a_group_that_cannot_be_asked_about_is_left_out(policy):
    """Its masks do not fit, or the server refuses its tokens; the other group is trained on."""
    good, short = group([2, 3], [2, 3, 4]), group([2, 3], [2, 3, 4], masks=[[-100, 3], [-100]])
    groups = [short, group([2, 3], [2, 999_999]), good]
    filled = await fill_missing_logprobs(groups, policy.sampler, RECIPE)
    assert (filled.num_rollouts, filled.num_tokens, list(filled.refusal_reasons)) == (2, 5, [1])
    assert "outside the vocabulary" in filled.refusal_reasons[1]
    batch = to_batch(groups, RECIPE, filled.refusal_reasons)
    assert (sorted(batch.drop_reasons), len(batch.datums)) == ([0, 1], 2)
    assert (
        batch.drop_reasons[0] == "rollout 1 has 3 tokens and 1 masks; needed: one entry per token"
    )


async def test_whatever_a_batch_trains_on_is_asked_about(policy):
    """Equal scores teach by a penalty on the distance to the base model, or by a teacher."""
    equal = group([2, 3], [2, 4], scores=[1.0, 1.0])
    taught = {
        **equal,
        "distill_token_ids": [[[2], [3]], [[2], [4]]],
        "distill_logprobs": [[[0.0], [-9.0]]] * 2,
    }
    assert (
        await fill_missing_logprobs([dict(equal)], policy.sampler, RECIPE) == RecomputedLogprobs()
    )
    assert await fill_missing_logprobs(
        [dict(equal)], policy.sampler, replace(RECIPE, has_kl_penalty=True)
    ) == RecomputedLogprobs(2, 4)
    assert await fill_missing_logprobs([taught], policy.sampler, RECIPE) == RecomputedLogprobs(2, 4)
    assert to_batch([taught], RECIPE).num_distilled == 2


async def test_they_are_asked_in_the_context_of_training(policy):
    """Without the template's second end-of-turn token, which training drops."""
    recipe = BatchSettings(max_tokens=8, eos_id=7)
    doubled = group([2, 5, 7, 7, 3, 4], [2, 5])
    doubled["masks"][0] = [-100, 5, 7, -100, -100, 4]
    await fill_missing_logprobs([doubled], policy.sampler, recipe)
    datum = to_batch([doubled], recipe).datums[0]
    expected = (await policy.compute_logprobs([2, 5, 7, 3, 4]))[datum.loss_mask]
    np.testing.assert_allclose(datum.logprobs[datum.loss_mask], expected, atol=1e-5)
