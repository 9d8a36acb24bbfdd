"""When a reward counts as a solution."""

import pytest

from lachesis.environment_toolkit.rollout import is_solution


@pytest.mark.parametrize(
    ("reward", "threshold", "solves"),
    [
        (1.0, 1.0, True),
        (0.1 + 0.2 + 0.7 - 1e-12, 1.0, True),
        (0.99, 1.0, False),
        (-1.0, -1.0, True),
        (-0.5, -1.0, True),
        (-1.1, -1.0, False),
        (0.0, 0.0, True),
    ],
)
def test_rounding_is_allowed_for_on_the_same_side_of_every_threshold(reward, threshold, solves):
    """A relative tolerance would refuse a negative threshold itself."""
    assert is_solution(reward, threshold) is solves
