"""Compute confidence intervals for shares of items, and for their differences."""

import math
import statistics
from collections.abc import Sequence

# The quantile of the normal distribution for a two-sided interval of 95 %.
Z_95 = 1.959963984540054


def wilson_interval(successes: float, items: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (E. B. Wilson, 1927).

    Unlike the textbook interval it stays inside [0, 1] and has a width at 0 and at 1.

    Args:
        successes: How many of the items count. A mean of several answers per item may make it a
            fraction.
        items: The number of independent items.

    Raises:
        ValueError: `items` is below 1, or `successes` is not between 0 and `items`.
    """
    if items < 1 or not 0 <= successes <= items:
        raise ValueError(
            f"{successes} of {items} is not a proportion; allowed: 0 to the number of items, of "
            "which there is at least one"
        )
    share, z_squared = successes / items, Z_95**2
    middle = (share + z_squared / (2 * items)) / (1 + z_squared / items)
    half_width = (
        Z_95
        / (1 + z_squared / items)
        * math.sqrt(share * (1 - share) / items + z_squared / (4 * items**2))
    )
    # against rounding
    return max(0.0, min(middle - half_width, share)), min(1.0, max(middle + half_width, share))


def newcombe_interval(
    first_share: float, first_items: int, second_share: float, second_items: int
) -> tuple[float, float]:
    """Return the 95 % interval of the first share less the second.

    It combines the score intervals of two independent shares; see method 10 of R. G. Newcombe,
    "Interval estimation for the difference between independent proportions", 1998. Shares of the
    same items vary together, so for those it is wider than it needs to be.

    Args:
        first_share: A share of the first items, from 0 to 1.
        first_items: The number of independent items behind it.
        second_share: A share of the second items, from 0 to 1.
        second_items: The number of independent items behind it.

    Raises:
        ValueError: A number of items is below 1, or a share is not between 0 and 1.
    """
    first_low, first_high = wilson_interval(first_share * first_items, first_items)
    second_low, second_high = wilson_interval(second_share * second_items, second_items)
    difference = first_share - second_share
    below = math.hypot(first_share - first_low, second_high - second_share)
    above = math.hypot(first_high - first_share, second_share - second_low)
    return max(-1.0, difference - below), min(1.0, difference + above)


# With fewer items the expansion below is not exact enough.
MIN_PAIRS = 10


def paired_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean difference of two scores of the same item (Student's t).

    The quantile of t is expanded around that of the normal distribution; see formula 26.7.5 of M.
    Abramowitz and I. Stegun, "Handbook of Mathematical Functions", 1964.

    Args:
        differences: The second score of each item less the first one.

    Returns:
        Both ends, or None where there are too few items, or where all differences are equal, of
            which no spread can be estimated.
    """
    num_items = len(differences)
    if num_items < MIN_PAIRS:
        return None
    spread = statistics.stdev(differences)
    if not spread:
        return None
    freedom, z = num_items - 1, Z_95
    quantile = (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
    middle, half_width = statistics.fmean(differences), quantile * spread / math.sqrt(num_items)
    return middle - half_width, middle + half_width
