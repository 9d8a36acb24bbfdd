"""Environments must sample from the weights that are trained, at any learning rate."""

import asyncio

import numpy as np
import pytest

from lachesis.base.errors import ServerProtocolError, WeightSyncError
from lachesis.base.tinker_client import call_sdk
from lachesis.trainer.batch.advantages import compute_learning_rate
from lachesis.trainer.batch.group_to_datums import Batch, Datum
from lachesis.trainer.trained_model import Policy
from lachesis.weight_agreement.at_weight_sync import WeightSample, WeightSyncCheck

TOKENS = np.arange(2, 12)


def batch():
    ones = np.ones(len(TOKENS), np.float32)
    return Batch([Datum(TOKENS, TOKENS + 1, -5 * ones, ones, np.ones(len(TOKENS), bool))])


async def play(policy, rates, *, stale_from=None):
    """Make an update at each rate as the loop does. From update `stale_from` on the sampler stays
    where it is.
    """
    sync_check = WeightSyncCheck(policy)
    for number, rate in enumerate(rates):
        await sync_check.take_reference(TOKENS)
        sampler = policy.sampler
        await policy.train(batch(), rate)
        if stale_from is not None and number >= stale_from:
            policy.sampler = sampler
        await sync_check.check()


class ShortAnswers:
    """A sampler whose server leaves out the log-probability of the first token."""

    def __init__(self, sampler):
        self.sampler = sampler

    async def compute_logprobs_async(self, prompt):
        logprobs: list[float | None] = await call_sdk(self.sampler, "compute_logprobs", prompt)
        return logprobs[1:]


async def test_a_server_with_one_logprob_too_few_ends_the_run_by_name(policy):
    sync_check = WeightSyncCheck(policy)
    await sync_check.take_reference(TOKENS)
    await policy.train(batch(), 1e-3)
    policy.sampler = ShortAnswers(policy.sampler)  # type: ignore[assignment]
    with pytest.raises(ServerProtocolError, match="9 log-probabilities of a text of 10 tokens"):
        await sync_check.check()


async def test_a_look_that_nobody_awaits_any_more_is_given_up(policy):
    sync_check = WeightSyncCheck(policy)
    await sync_check.take_reference(TOKENS)
    sync_check.start_change_measurement(TOKENS)
    (task,) = (
        all_task for all_task in asyncio.all_tasks() if all_task is not asyncio.current_task()
    )
    sync_check.close()
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.parametrize(
    "rates",
    [
        [1e-3],
        [0.0],
        [1e-12] * 5,
        [
            compute_learning_rate(1e-4, step, 300, schedule="cosine", warmup_steps=0)
            for step in (299,)
        ],
        [
            compute_learning_rate(4e-5, step, 300, schedule="constant", warmup_steps=100)
            for step in range(4)
        ],
        [1e-2] * 9,
    ],
    ids=["usual", "none", "tiny", "last of a cosine", "warm-up", "large"],
)
async def test_a_sampler_that_follows_is_let_through_at_any_rate(policy, rates):
    await play(policy, rates)


async def test_values_that_rounding_has_kept_the_same_are_let_through(policy, monkeypatch):
    """An engine in bfloat16 gives the same digits after a small update, or moves one side by a step
    of the rounding alone.
    """

    def rounded(values):
        # 1.6e-2, as bfloat16 between 4 and 8 has
        return np.round(np.asarray(values, np.float64) * 64) / 64

    original = Policy.compute_logprobs

    async def logprobs(self, tokens):
        return rounded(await original(self, tokens) + 0.005)

    monkeypatch.setattr(Policy, "compute_logprobs", logprobs)
    await play(policy, [1e-5] * 5)


async def test_a_sampler_that_stays_where_it_was_fails_the_run(policy):
    with pytest.raises(WeightSyncError, match="do not follow training: after"):
        await play(policy, [3e-3] * 40, stale_from=0)


async def test_a_sampler_that_falls_behind_later_fails_the_run(policy):
    with pytest.raises(WeightSyncError, match=r"do not follow training|are not those in training"):
        await play(policy, [3e-3] * 70, stale_from=9)


async def test_a_sampler_of_other_weights_fails_the_run(policy):
    """It follows its trainer, and is far from it."""
    sync_check = WeightSyncCheck(policy)
    await sync_check.take_reference(TOKENS)
    for _ in range(3):
        await policy.train(batch(), 3e-2)
    far = policy.sampler
    policy.sampler = None
    other = await Policy.create(policy.config, resume_from=None)
    other.sampler = far
    sync_check.policy = other
    with pytest.raises(WeightSyncError, match="are not those in training"):
        await sync_check.check()
    await other.close("success")


def look(gap, moved=0.0):
    """What both sides give when training has moved the text so far; the sampler has a gap."""
    return WeightSample(
        sampler_logprobs=np.full(9, moved - 3.0 + gap), trainer_logprobs=np.full(9, moved - 3.0)
    )


async def play_looks(*looks):
    """Give these answers in turn, the first ones before training; what each check returns."""
    answers, results = list(looks), []

    class Played(WeightSyncCheck):
        async def _sample_weights(self) -> WeightSample | None:
            return answers.pop(0)

    sync_check = Played(None)  # type: ignore[arg-type]
    await sync_check.take_reference(TOKENS)
    while answers:
        results.append(await sync_check.check())
    return results


async def test_one_look_that_is_off_ends_no_run():
    """A server in bfloat16, or one with experts, may round a text otherwise in another batch."""
    assert await play_looks(look(0.01), look(0.06), look(0.02)) == pytest.approx([0.02])
    assert await play_looks(look(0.06), look(0.02), look(0.03)) == pytest.approx([0.03])
    assert await play_looks(look(0.01), look(0.06), None, look(0.02)) == [None, pytest.approx(0.02)]
    behind = WeightSample(
        sampler_logprobs=look(0.01).sampler_logprobs,
        trainer_logprobs=look(0.0, 0.04).trainer_logprobs,
    )
    assert await play_looks(look(0.01), behind, look(0.01, 0.04)) == pytest.approx([0.01])
    first = look(0.01)
    for looks in ([look(0.06)] * 2, [first, look(0.06), look(0.07)], [first, behind, behind]):
        with pytest.raises(WeightSyncError):
            await play_looks(*looks)


async def test_later_differences_are_compared_with_the_one_before_training():
    """Where rounding alone makes a large one, it is no sign of other weights."""
    assert await play_looks(look(0.03), look(0.08)) == pytest.approx([0.08])
    with pytest.raises(WeightSyncError, match=r"differ by 0\.1 nats .* allowed: 0\.09"):
        await play_looks(look(0.03), look(0.1), look(0.1))
    with pytest.raises(WeightSyncError, match=r"allowed: 0\.05"):
        await play_looks(look(0.001), look(0.06), look(float("nan")))


async def test_a_text_of_one_token_is_passed_over(policy):
    """A first datum may have one position; a later one gives the text."""
    sync_check = WeightSyncCheck(policy)
    await sync_check.take_reference([5])
    await policy.train(batch(), 1e-3)
    await sync_check.check()
    sync_check.start_change_measurement([5])
    assert await sync_check.finish_change_measurement() is None
    await sync_check.take_reference(TOKENS)
    sync_check.start_change_measurement(TOKENS)
    assert await sync_check.finish_change_measurement() == pytest.approx(0.0, abs=1e-5)


async def test_a_server_that_does_not_answer_a_look_does_not_end_the_run(policy, monkeypatch):
    """The next update is another chance."""
    sync_check = WeightSyncCheck(policy)
    await sync_check.take_reference(TOKENS)

    async def fail(self, tokens):
        raise ConnectionError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(Policy, "compute_logprobs", fail)
        assert await sync_check.check() is None
    assert await sync_check.check() == pytest.approx(0.0, abs=1e-4)
