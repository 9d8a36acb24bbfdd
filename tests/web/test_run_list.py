"""The sparklines of the list: what a line's height means, and which steps it shows."""

import pytest

from lachesis.reporting.run_cache import RunCache
from lachesis.web.inline_svg import SPARK_HEIGHT, SPARK_MARGIN, draw_sparkline
from tests.harness.home import create_run

TOP, BOTTOM = SPARK_MARGIN, SPARK_HEIGHT - SPARK_MARGIN


@pytest.mark.parametrize(
    ("rewards", "end_y"),
    [
        ([0.2, 1.0], TOP),
        ([0.2, 0.0], BOTTOM),
        ([0.2, 0.5], (TOP + BOTTOM) / 2),
        ([0.0, 5.0], TOP),
        ([1.0, -3.0], BOTTOM),
        ([-1.0, 0.0], (TOP + BOTTOM) / 2),
    ],
)
def test_a_line_reaches_from_0_to_1_or_as_far_as_its_rewards(rewards, end_y):
    line = draw_sparkline(list(enumerate(rewards, 1)), 2)
    assert float(line.end_y) == pytest.approx(end_y, abs=0.05)


def test_a_run_without_rewards_has_no_line():
    assert draw_sparkline([], 9) is None


def test_steps_that_a_resume_takes_again_are_not_drawn(store):
    record = create_run(store, steps=[0.1, 0.2, 0.3, 0.9])
    samples = RunCache(store).read_reward_samples(record.run_id, 3)
    assert samples == [(1, 0.1), (2, 0.2), (3, 0.3)]
