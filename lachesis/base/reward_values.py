"""Say which values can be a reward."""

from typing import Any

# Sums and squares of larger numbers soon become infinite.
MAX_ABS_SCORE = 1e30


def is_score(value: Any) -> bool:
    """Return whether a value can be a reward: a finite number below `MAX_ABS_SCORE` in absolute
    value.

    Numbers of Python, numpy and torch are accepted.
    """
    if isinstance(value, str | bytes) or value is None:
        return False
    try:
        return abs(float(value)) < MAX_ABS_SCORE
    except (TypeError, ValueError, OverflowError):
        return False
