"""The interval of a share."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.base.confidence_intervals import newcombe_interval, wilson_interval


@given(
    st.integers(1, 10_000).flatmap(lambda items: st.tuples(st.integers(0, items), st.just(items)))
)
def test_it_holds_the_share_and_stays_a_share(counts):
    successes, items = counts
    low, high = wilson_interval(successes, items)
    assert 0 <= low <= successes / items <= high <= 1
    assert high > low


@given(st.integers(1, 2000).flatmap(lambda items: st.tuples(st.integers(0, items), st.just(items))))
def test_failures_have_the_mirrored_interval(counts):
    successes, items = counts
    low, high = wilson_interval(successes, items)
    assert wilson_interval(items - successes, items) == pytest.approx((1 - high, 1 - low))


def test_published_values():
    """From the worked example of 81 successes of 263 in R. G. Newcombe, Statistics in Medicine 17
    (1998), table I.
    """
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_it_covers_the_truth_about_as_often_as_it_says():
    draw, hits = random.Random(0), 0
    for _ in range(2000):
        low, high = wilson_interval(sum(draw.random() < 0.3 for _ in range(60)), 60)
        hits += low <= 0.3 <= high
    assert 0.93 < hits / 2000 < 0.97


@pytest.mark.parametrize(("successes", "items"), [(0, 0), (-1, 4), (5, 4)])
def test_what_is_no_share_is_refused(successes, items):
    with pytest.raises(ValueError, match="is not a proportion"):
        wilson_interval(successes, items)


def test_published_values_of_differences():
    """From table II of R. G. Newcombe, Statistics in Medicine 17 (1998), method 10."""
    assert newcombe_interval(56 / 70, 70, 48 / 80, 80) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert newcombe_interval(9 / 10, 10, 3 / 10, 10) == pytest.approx((0.1705, 0.8090), abs=5e-5)
    assert newcombe_interval(10 / 10, 10, 0.0, 10) == pytest.approx((0.6075, 1.0), abs=5e-5)


@given(st.integers(0, 30), st.integers(0, 40))
def test_a_difference_has_the_mirrored_interval_of_its_negative(first, second):
    low, high = newcombe_interval(first / 30, 30, second / 40, 40)
    assert newcombe_interval(second / 40, 40, first / 30, 30) == pytest.approx((-high, -low))
    assert -1 <= low <= first / 30 - second / 40 <= high <= 1
