"""Which numbers can be a reward."""

from __future__ import annotations

from typing import Any

MAX_ABS_SCORE = 1e30
"""Sums and squares of larger numbers are infinite soon."""


def is_score(value: Any) -> bool:
    """Whether a value can be a reward: a finite number of usual size, of Python or of numpy or
    torch.
    """
    if isinstance(value, str | bytes) or value is None:
        return False
    try:
        return abs(float(value)) < MAX_ABS_SCORE
    except (TypeError, ValueError, OverflowError):
        return False
