"""Write numbers, times and counts as the pages show them.

Rewards and shares have three digits, the ends of intervals two, times their two largest units, and
large numbers commas. A negative number has a true minus sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from lachesis.runs.held_out_results import HeldOutPoint

_NUMBER_WORDS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
)
# A younger run is said to be from just now.
JUST_NOW = timedelta(seconds=90)


def format_reward(value: float | None) -> str:
    """Return a reward or a share with three digits."""
    if value is None:
        return "–"
    return f"{value:.3f}".replace("-", "−")


def format_interval(point: HeldOutPoint) -> str:
    """Return the 95 % interval of a share with its number of items, as in `0.81 to 1.00, n 20`."""
    if point.low is None or point.high is None:
        return "items not counted"
    return f"{point.low:.2f} to {point.high:.2f}, n {point.items}"


def format_percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{share * 100:.0f} %"


def format_setting(value: Any) -> str:
    """Return the value of a setting as a person would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return format_decimal(value)
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    return str(value)


def format_decimal(value: float) -> str:
    """Return a number without an exponent where that is short, as in `0.00004`."""
    if not 1e-6 <= abs(value) < 1e15 and value:
        text = f"{value:.3g}"
    elif value == int(value):
        text = f"{int(value):,}"
    else:
        text = f"{value:.10f}".rstrip("0")
    return text.replace("-", "−")


def count_in_words(count: int, *, is_first: bool = False) -> str:
    """Return a count as a word up to ten; `is_first` says that it begins a sentence."""
    if count >= len(_NUMBER_WORDS):
        return f"{count:,}"
    word = _NUMBER_WORDS[count]
    return word.capitalize() if is_first else word


def join_words(words: Sequence[str]) -> str:
    """Return words as an enumeration, as in `A, B and C`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def format_moment(iso_time: str, now: datetime | None = None) -> str:
    """Return a time as a person says it: `just now`, `today, 12:35`, or `24 Nov 2026, 12:35`."""
    moment = datetime.fromisoformat(iso_time).astimezone()
    now = now or datetime.now(moment.tzinfo)
    if timedelta(0) <= now - moment < JUST_NOW:
        return "just now"
    days = (now.date() - moment.date()).days
    day = {0: "today", 1: "yesterday"}.get(days)
    if day is None:
        day = f"{moment.day} {moment:%b}" + ("" if moment.year == now.year else f" {moment.year}")
    return f"{day}, {moment:%H:%M}"


def format_day_and_time(iso_time: str) -> str:
    """Return a time with its day, as in `24 Nov 2026, 12:35`."""
    moment = datetime.fromisoformat(iso_time).astimezone()
    return f"{moment.day} {moment:%b %Y, %H:%M}"
