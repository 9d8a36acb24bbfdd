"""Write texts for people: numbers, durations, sizes, times, words, and "did you mean".

Rewards and shares have three digits, large numbers commas, and a negative number has a true minus
sign. What is missing is a dash.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

MISSING = "–"


def format_reward(value: float | None) -> str:
    """Return a reward or a share with three digits."""
    if value is None:
        return MISSING
    return f"{value:.3f}".replace("-", "−")


def format_percent(share: float) -> str:
    """Return a share as a percentage; only 0 and 1 are 0 % and 100 %."""
    percent = share * 100
    for digits in (0, 1, 2):
        text = f"{percent:.{digits}f}"
        if float(text) not in (0.0, 100.0) or share in (0, 1):
            return f"{text} %".replace("-", "−")
    return "below 0.01 %" if share < 0.5 else "above 99.99 %"


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


def format_decimal(value: float | None, missing: str = MISSING) -> str:
    """Return a number without an exponent where that is short, as in `0.00004`."""
    if value is None:
        return missing
    if not 1e-6 <= abs(value) < 1e15 and value:
        text = f"{value:.3g}"
    elif value == int(value):
        text = f"{int(value):,}"
    else:
        text = f"{value:.10f}".rstrip("0")
    return text.replace("-", "−")


def format_dollars(amount: float) -> str:
    """Return an amount of US dollars with cents, or with two digits that are not 0."""
    digits = 2
    if 0 < amount < 0.1:
        digits = max(2, 1 - math.floor(math.log10(amount)))
    return f"${amount:,.{digits}f}"


def format_range(low: float, high: float, write: Callable[[float], str]) -> str:
    """Return a range with both ends written by `write`."""
    return f"{write(low)} to {write(high)}"


def format_duration(seconds: float) -> str:
    """Return a duration in at most two units, as in `1 h 20 min`, `3 min` or `45 s`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def format_bytes(num_bytes: int) -> str:
    """Return a size in the unit that gives it at most four digits."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def shorten_count(number: float) -> str:
    """Return a count with at most three digits and a letter for its size, as in `330 k`."""
    value = number
    for letter in ("", " k", " M"):
        if abs(value) < 999.5:
            return f"{value:.3g}{letter}" if letter else f"{value:.0f}"
        value /= 1000
    return f"{value:,.3g} G" if abs(value) < 999.5 else f"{value:,.0f} G"


# Characters that move the cursor, change colours or directions, or write to a clipboard.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def show_controls(text: str) -> str:
    """Return a text of others for a terminal: its control characters become visible escapes."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def keep_ends(text: str, max_characters: int) -> str:
    """Shorten a long string by its middle, and say how many characters were left out."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]} … ({left_out:,} more characters) … {text[-half:]}"


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


# A younger run is said to be from just now.
JUST_NOW = timedelta(seconds=90)


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


MIN_SIMILARITY = 0.7
# A name is shorter; comparing two long texts takes long.
MAX_LENGTH = 80


def suggest(word: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean X` for the nearest allowed word, or nothing if none is near."""
    matches = difflib.get_close_matches(word[:MAX_LENGTH], list(allowed), 1, MIN_SIMILARITY)
    if matches:
        return f"; did you mean {matches[0]}"
    return ""
