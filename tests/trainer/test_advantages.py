"""Advantages, weights, penalties and schedules, against numbers worked out by hand."""

import numpy as np
import pytest

from lachesis.trainer.batch.advantages import (
    compute_advantages,
    compute_learning_rate,
    compute_sequence_weights,
)

SCORES = np.array([1.0, 0.0, 0.0, 1.0, 3.0])


def test_the_standard_deviation_scales():
    """The variance is (0 + 1 + 1 + 0 + 4) / 5 = 1.2."""
    np.testing.assert_allclose(
        compute_advantages(SCORES, "mean_std"),
        np.array([0.0, -1.0, -1.0, 0.0, 2.0]) / 1.2**0.5,
        rtol=1e-5,
    )
    assert compute_advantages(np.array([2.0, 2.0]), "mean_std").tolist() == [0.0, 0.0]


def test_a_short_rollout_weighs_as_much_as_a_long_one():
    """Mean length 4: factors 4/2 and 4/6; tokens times factor are equal, and their sum stays."""
    factors = compute_sequence_weights([2, 6])
    np.testing.assert_allclose(factors, [2.0, 2 / 3])
    np.testing.assert_allclose(factors * [2, 6], [4.0, 4.0])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]), ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25])],
)
def test_the_learning_rate_rises_and_then_stays_or_falls(schedule, expected):
    found = [
        compute_learning_rate(1.0, step, 6, schedule=schedule, warmup_steps=2) for step in range(6)
    ]  # type: ignore[arg-type]
    np.testing.assert_allclose(found, expected)


def test_the_cosine_is_at_half_of_its_height_half_way():
    found = [
        compute_learning_rate(2.0, step, 4, schedule="cosine", warmup_steps=0) for step in range(4)
    ]
    np.testing.assert_allclose(found, [2.0, 1.0 + 2**-0.5, 1.0, 1.0 - 2**-0.5])
