"""Numbers for people say no more and no less than is known."""

import pytest

from lachesis.base.formatting import (
    format_dollars,
    format_percent,
    format_range,
    format_reward,
    shorten_count,
)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (1.0, "100 %"), (0.5, "50 %"), (0.996, "99.6 %"), (0.9996, "99.96 %"),
     (0.004, "0.4 %"), (0.00001, "below 0.01 %"), (0.99999, "above 99.99 %")],
)  # fmt: skip
def test_only_all_is_100_percent_and_only_nothing_is_0(share, text):
    assert format_percent(share) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (999.6, "1 k"), (1000, "1 k"), (158_400, "158 k"), (999_999, "1 M"),
     (72e6, "72 M"), (1.5e9, "1.5 G"), (12_345e9, "12,345 G")],
)  # fmt: skip
def test_counts_have_three_digits_and_no_exponent(number, text):
    assert shorten_count(number) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "$0.00"), (1234.5, "$1,234.50"), (0.063, "$0.063"), (0.0021, "$0.0021"),
     (0.00001, "$0.000010"), (0.1, "$0.10"), (0.999, "$1.00")],
)  # fmt: skip
def test_a_small_amount_is_not_nothing(amount, text):
    assert format_dollars(amount) == text


def test_missing_is_a_dash_and_minus_a_minus():
    assert [format_reward(value) for value in (None, -0.25, 12.5)] == ["–", "−0.250", "12.500"]
    assert format_range(0.05, 2, format_dollars) == "$0.050 to $2.00"
