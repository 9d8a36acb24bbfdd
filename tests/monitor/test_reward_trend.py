"""The sums over a run's steps, and the test of a rise."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.monitor.reward_trend import (
    MAX_BLOCKS,
    MAX_HELD_OUT_POINTS,
    WINDOW,
    Trend,
    _compute_t_quantile,
)

REWARDS = st.lists(st.floats(-10, 10), max_size=400)


def trend_of(rewards, *, parts=1):
    """Take the rewards in, in so many parts."""
    steps = [{"step": number, "reward/mean": reward} for number, reward in enumerate(rewards, 1)]
    trend, size = Trend(), max(1, math.ceil(len(steps) / parts))
    for start in range(0, len(steps), size):
        trend.add(steps[start : start + size])
        trend = Trend.model_validate_json(trend.model_dump_json())
    return trend


@settings(max_examples=60, derandomize=True)
@given(rewards=REWARDS, parts=st.integers(1, 7))
def test_looking_often_or_once_keeps_the_same_sums(rewards, parts):
    once, often = trend_of(rewards), trend_of(rewards, parts=parts)
    assert once.model_copy(update={"risen_at": None}) == often.model_copy(update={"risen_at": None})
    assert (often.risen_at is None) or rewards


@settings(max_examples=60, derandomize=True)
@given(rewards=REWARDS)
def test_nothing_is_lost_and_little_is_kept(rewards):
    trend = trend_of(rewards)
    assert trend.num_steps == len(rewards)
    assert len(trend.blocks) <= MAX_BLOCKS
    assert sum(block[2] for block in trend.blocks) == pytest.approx(math.fsum(rewards), abs=1e-6)
    assert trend.first_rewards == rewards[:WINDOW]
    assert trend.recent_rewards == rewards[-WINDOW:]
    windows = [
        statistics.fmean(rewards[at : at + WINDOW])
        for at in range(0, len(rewards) - WINDOW + 1, WINDOW // 2)
    ]
    assert trend.best == (pytest.approx(max(windows)) if windows else None)


@settings(max_examples=60, derandomize=True)
@given(
    rewards=st.lists(st.floats(0, 1), min_size=20, max_size=300),
    shift=st.floats(-5, 5),
    scale=st.floats(0.1, 5),
)
def test_neither_a_shift_nor_a_scale_changes_whether_a_rise_is_seen(rewards, shift, scale):
    """Except at the edge of the decision, where rounding decides."""
    rise = trend_of(rewards).estimate_rise()
    moved = trend_of([shift + scale * reward for reward in rewards]).estimate_rise()
    assert rise is not None
    assert moved is not None
    if rise.standard_error > 1e-6 and statistics.pstdev(rewards) > 1e-3:
        assert moved.slope / moved.standard_error == pytest.approx(
            rise.slope / rise.standard_error, rel=1e-3, abs=1e-3
        )


def test_the_slope_is_that_of_a_regression():
    rewards = [0.1 + 0.002 * number + 0.01 * math.sin(number) for number in range(160)]
    rise = trend_of(rewards).estimate_rise()
    assert rise is not None
    assert rise.slope == pytest.approx(0.002, rel=0.02)
    assert rise.is_significant
    assert rise.is_certain
    assert rise.compute_max_rise(160) == pytest.approx(0.32, rel=0.1)


def test_few_steps_show_no_rise():
    assert Trend().estimate_rise() is None
    assert Trend().num_steps == 0
    assert Trend().window_standard_error == 0.0
    assert trend_of([0.1] * 19).estimate_rise() is None
    short = trend_of([0.01 * number for number in range(59)]).estimate_rise()
    assert short is not None
    assert (short.is_significant, short.is_certain) == (True, False)


QUANTILES = {
    2: 4.3027,
    3: 3.1824,
    4: 2.7764,
    5: 2.5706,
    6: 2.4469,
    8: 2.3060,
    10: 2.2281,
    14: 2.1448,
}
"""Of Student's t, for 97.5 %, from the table of Abramowitz and Stegun (1964)."""


@pytest.mark.parametrize(("freedom", "quantile"), QUANTILES.items())
def test_the_quantile_is_that_of_student(freedom, quantile):
    assert _compute_t_quantile(freedom) == pytest.approx(
        quantile, rel=0.06 if freedom == 2 else 0.01
    )


def held_out(step, **changes):
    values = {
        "eval/percent_correct": 0.5,
        "eval/low": 0.4,
        "eval/high": 0.6,
        "eval/step": step - 1,
        "reward/mean": 0.3,
    }
    return {"step": step, **values, **changes}


def test_held_out_results_are_kept_with_the_reward_of_their_time():
    trend = Trend()
    trend.add(
        [
            held_out(1),
            held_out(2, **{"eval/step": None}),
            held_out(3, **{"eval/low": None}),
            {"step": 4},
        ]
    )
    assert [(point.step, point.share, point.reward) for point in trend.held_out] == [
        (0, 0.5, 0.3),
        (2, 0.5, 0.3),
    ]
    assert trend.held_out[0].error == pytest.approx(0.2 / (2 * 1.96))
    for step in range(5, 400):
        trend.add([held_out(step)])
    assert MAX_HELD_OUT_POINTS / 2 <= len(trend.held_out) <= MAX_HELD_OUT_POINTS
    assert trend.held_out[0].step == 0, "the first one stays"


def test_a_held_out_result_before_the_first_reward_is_left_out():
    trend = Trend()
    trend.add([held_out(1, **{"reward/mean": None})])
    assert trend.held_out == []


def test_counts_of_an_earlier_attempt_are_left_out():
    trend = Trend()
    counts = {"batch/rollouts": 8, "rollouts/invalid": 3.0}
    trend.add(
        [{"step": 1, "time": 50.0, **counts}, {"step": 2, "time": 150.0, **counts}], since=100.0
    )
    assert (trend.rollouts, trend.invalid) == (8, 3)


def test_sums_of_a_release_that_counted_less_say_nothing_of_what_it_did_not_count():
    step = {"step": 1, "batch/rollouts": 8, "rollouts/raised": 2.0}
    trend = Trend()
    trend.add([step])
    assert trend.raised == 2
    saved = trend.model_dump()
    del saved["raised"]
    older = Trend.model_validate(saved)
    older.add([{**step, "step": 2}])
    assert older.raised is None
