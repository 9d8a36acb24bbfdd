"""What a group of rollouts holds when some have no valid score."""

import json

import pytest

from lachesis.environment import Invalid, Outcome
from lachesis.environment_toolkit.single_turn import build_scored_group
from lachesis.trainer.batch.group_to_datums import BatchSettings, to_batch
from tests.environment_toolkit.conftest import LOGPROB
from tests.environment_toolkit.words import Words


async def test_tokens_are_those_that_were_sampled(made, generator):
    env = made(Words, system_prompt="Short.")
    await env.setup()
    generator.say = lambda prompt, n: ["ja", "no…"]
    whole, cut = await env.sample_rollouts({"question": "why", "answer": "so"}, 2)
    decoded = env.tokenizer.decode(whole.tokens)
    assert decoded == "<|user|>Short.<|end|><|user|>why<|end|><|assistant|>ja<|end|>"
    sampled = [token for token in whole.masks if token != -100]
    assert sampled == whole.tokens[-3:]
    assert whole.logprobs[-3:] == [LOGPROB] * 3
    assert set(whole.logprobs[:-3]) == {1.0}
    assert len(whole.tokens) == len(whole.masks) == len(whole.logprobs)
    assert (whole.truncated, cut.truncated, whole.sampled_tokens, cut.sampled_tokens) == (
        False,
        True,
        3,
        2,
    )


async def test_an_invalid_rollout_takes_no_part_in_training(made, generator):
    env = made(Words)
    await env.setup()
    item = env.items.train[0]
    generator.say = lambda prompt, n: [item["answer"], "invalid", "zero", "half"]
    group, _ = await env.collect_trajectories(item)
    assert group["scores"] == [1.0, 0.5, 0.0, 0.5], "the invalid one has the mean of the others"
    invalid = {"invalid": "the judge is away", "set_advantage_to_zero": True}
    assert group["overrides"] == [{}, invalid, {"zero": "it rambles"}, {}]
    assert set(group["masks"][1]) == {-100}
    batch = to_batch(
        [json.loads(json.dumps(group))],
        BatchSettings(max_tokens=100, eos_id=env.tokenizer.eos_token_id),
    )
    advantages = [float(datum.advantages[datum.loss_mask][0]) for datum in batch.datums]
    assert advantages == [0.5, -0.5], (
        "those of 1.0 and 0.0; that of 0.5 is nought, as without the invalid one"
    )
    assert (batch.scores, batch.num_invalid, batch.compute_metrics()["batch/invalid"]) == (
        [1.0, 0.0, 0.5],
        1,
        1,
    )


async def test_a_group_without_a_valid_rollout_is_none(made, generator):
    env = made(Words)
    await env.setup()
    generator.say = lambda prompt, n: ["nan", "invalid", "nan", "nan"]
    with pytest.raises(
        Invalid, match="all 4 rollouts are invalid: the score is nan; the judge is away"
    ):
        await env.collect_trajectories(env.items.train[0])


async def test_equal_rewards_beside_an_invalid_one_are_equal(made, generator):
    """The mean of three times 0.1 is not 0.1."""
    env = made(Words)
    await env.setup()
    rollouts = await env.sample_rollouts(env.items.train[0], 4)
    for one in rollouts:
        one.outcome = Outcome(0.1)
    rollouts[3].outcome = Outcome(None, reason="away")
    assert len(set(build_scored_group(rollouts)["scores"])) == 1
