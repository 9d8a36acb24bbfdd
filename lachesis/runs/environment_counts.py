"""Read the counts that environments write about themselves; see `lachesis.env_process.counters`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from lachesis.base.failure_reasons import merge_counts
from lachesis.base.json_text import Json


def read_counts(file: Path, *, since: float = 0.0) -> Json | None:
    """Return the counts in a file, or None if they were last written before `since` (Unix time)."""
    try:
        counts = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(counts, dict):
        return None
    written_at = counts.get("written_at")
    if isinstance(written_at, int | float) and written_at >= since:
        return counts
    return None


def read_all_counts(files: Iterable[Path], *, since: float = 0.0) -> Json | None:
    """Return the counts of several environments combined, or None.

    Numbers are added; the oldest time of writing and the newest group are kept.
    """
    all_counts = [
        counts for file in files if (counts := read_counts(file, since=since)) is not None
    ]
    if len(all_counts) < 2:
        if all_counts:
            return all_counts[0]
        return None
    merged: Json = {"errors": {}, "zero_reasons": {}}
    for counts in all_counts:
        for key, value in counts.items():
            if key in ("errors", "zero_reasons"):
                merge_counts(merged[key], value)
            elif value is not None and (key == "written_at" or key.endswith("_since")):
                merged[key] = min(merged.get(key, value), value)
            elif value is not None and key == "last_group_at":
                merged[key] = max(merged.get(key, value), value)
            elif isinstance(value, int | float) and key != "pid":
                merged[key] = merged.get(key, 0) + value
    return merged
