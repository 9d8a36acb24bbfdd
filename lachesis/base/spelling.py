"""Suggest the nearest allowed word for one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MIN_SIMILARITY = 0.7
# A name is shorter; comparing two long texts takes long.
MAX_LENGTH = 80


def suggest(word: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean X` for the nearest allowed word, or nothing if none is near."""
    matches = difflib.get_close_matches(word[:MAX_LENGTH], list(allowed), 1, MIN_SIMILARITY)
    if matches:
        return f"; did you mean {matches[0]}"
    return ""
