"""The interval of a share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.base.intervals import wilson_interval


@given(
    st.integers(1, 10_000).flatmap(lambda items: st.tuples(st.integers(0, items), st.just(items)))
)
def test_it_holds_the_share_and_stays_a_share(counts: tuple[int, int]) -> None:
    successes, items = counts
    low, high = wilson_interval(successes, items)
    assert 0 <= low <= successes / items <= high <= 1
    assert high > low


@given(st.integers(1, 2000).flatmap(lambda items: st.tuples(st.integers(0, items), st.just(items))))
def test_failures_have_the_mirrored_interval(counts: tuple[int, int]) -> None:
    successes, items = counts
    low, high = wilson_interval(successes, items)
    assert wilson_interval(items - successes, items) == pytest.approx((1 - high, 1 - low))


def test_published_values() -> None:
    """From the worked example of 81 successes of 263 in R. G. Newcombe, Statistics in Medicine 17
    (1998), table I.
    """
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_it_covers_the_truth_about_as_often_as_it_says() -> None:
    draw, hits = random.Random(0), 0
    for _ in range(2000):
        low, high = wilson_interval(sum(draw.random() < 0.3 for _ in range(60)), 60)
        hits += low <= 0.3 <= high
    assert 0.93 < hits / 2000 < 0.97


@pytest.mark.parametrize(("successes", "items"), [(0, 0), (-1, 4), (5, 4)])
def test_what_is_no_share_is_refused(successes: int, items: int) -> None:
    with pytest.raises(ValueError, match="is not a share"):
        wilson_interval(successes, items)
