"""The first update must reach the environments."""

from __future__ import annotations

import numpy as np
import pytest

from lachesis.errors import CanaryError
from lachesis.trainer.batch import Batch, Datum
from lachesis.trainer.canary import Canary
from lachesis.trainer.policy import Policy

TOKENS = np.arange(2, 12)


def batch() -> Batch:
    ones = np.ones(len(TOKENS), np.float32)
    return Batch([Datum(TOKENS, TOKENS + 1, -5 * ones, ones, np.ones(len(TOKENS), bool))])


async def test_an_update_that_arrives_is_let_through(policy: Policy) -> None:
    canary = Canary(policy)
    await canary.before(TOKENS)
    await policy.train(batch(), 1e-3)
    await canary.check()


async def test_a_sampler_that_stays_where_it_was_fails_the_run(policy: Policy) -> None:
    canary, old = Canary(policy), policy.sampler
    await canary.before(TOKENS)
    await policy.train(batch(), 1e-3)
    policy.sampler = old
    with pytest.raises(CanaryError, match="did not change with the first update"):
        await canary.check()


async def test_a_sampler_of_other_weights_fails_the_run(policy: Policy) -> None:
    """It follows its trainer, and is far from it."""
    canary = Canary(policy)
    await canary.before(TOKENS)
    for _ in range(3):
        await policy.train(batch(), 3e-2)
    far = policy.sampler
    policy.sampler = None
    other = await Policy.create(policy.config, resume_from=None)
    other.sampler = far
    canary.policy = other
    with pytest.raises(CanaryError, match="are not those in training"):
        await canary.check()
    await other.close("success")
