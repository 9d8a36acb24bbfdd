"""Write texts for people: numbers with their units, and "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"


MIN_SIMILARITY = 0.7
# A name is shorter; comparing two long texts takes long.
MAX_LENGTH = 80


def suggest(word: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean X` for the nearest allowed word, or nothing if none is near."""
    matches = difflib.get_close_matches(word[:MAX_LENGTH], list(allowed), 1, MIN_SIMILARITY)
    if matches:
        return f"; did you mean {matches[0]}"
    return ""
