"""Advantages, weights, penalties and schedules, against numbers worked out by hand."""

import numpy as np
import pytest

from lachesis.trainer.batch.advantages import (
    compute_advantages,
    compute_learning_rate,
    compute_sequence_weights,
)
from lachesis.trainer.batch.kl_penalty import compute_kl_penalties

SCORES = np.array([1.0, 0.0, 0.0, 1.0, 3.0])


def test_the_mean_of_the_group_is_taken_off() -> None:
    np.testing.assert_allclose(compute_advantages(SCORES, "mean"), [0.0, -1.0, -1.0, 0.0, 2.0])


def test_the_standard_deviation_scales() -> None:
    """The variance is (0 + 1 + 1 + 0 + 4) / 5 = 1.2."""
    np.testing.assert_allclose(
        compute_advantages(SCORES, "mean_std"),
        np.array([0.0, -1.0, -1.0, 0.0, 2.0]) / 1.2**0.5,
        rtol=1e-5,
    )
    assert compute_advantages(np.array([2.0, 2.0]), "mean_std").tolist() == [0.0, 0.0]


def test_leave_one_out_compares_with_the_others() -> None:
    """The third: 0 - (1 + 0 + 1 + 3) / 4 = -1.25; the last: 3 - 2 / 4 = 2.5."""
    np.testing.assert_allclose(
        compute_advantages(SCORES, "leave_one_out"), [0.0, -1.25, -1.25, 0.0, 2.5]
    )


def test_a_short_rollout_weighs_as_much_as_a_long_one() -> None:
    """Mean length 4: factors 4/2 and 4/6; tokens times factor are equal, and their sum stays."""
    factors = compute_sequence_weights([2, 6])
    np.testing.assert_allclose(factors, [2.0, 2 / 3])
    np.testing.assert_allclose(factors * [2, 6], [4.0, 4.0])


def test_the_penalty_pulls_towards_the_base_model_and_adds_up_to_zero() -> None:
    """lp - base is 1, 0 and -0.25, 0.25 on average."""
    sampling, base = (
        [np.array([-1.0, -2.0]), np.array([-0.5])],
        [np.array([-2.0, -2.0]), np.array([-0.25])],
    )
    penalties, mean = compute_kl_penalties(sampling, base, 0.1)
    assert mean == pytest.approx(0.25)
    np.testing.assert_allclose(penalties[0], [-0.075, 0.025])
    np.testing.assert_allclose(penalties[1], [0.05])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]), ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25])],
)
def test_the_learning_rate_rises_and_then_stays_or_falls(
    schedule: str, expected: list[float]
) -> None:
    found = [
        compute_learning_rate(1.0, step, 6, schedule=schedule, warmup_steps=2) for step in range(6)
    ]  # type: ignore[arg-type]
    np.testing.assert_allclose(found, expected)


def test_the_cosine_is_at_half_of_its_height_half_way() -> None:
    found = [
        compute_learning_rate(2.0, step, 4, schedule="cosine", warmup_steps=0) for step in range(4)
    ]
    np.testing.assert_allclose(found, [2.0, 1.0 + 2**-0.5, 1.0, 1.0 - 2**-0.5])
