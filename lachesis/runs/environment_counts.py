"""Read what environments have counted of themselves; see `lachesis.env_process.counters`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lachesis.base.failure_reasons import merge_counts

Json = dict[str, Any]


def read_counts(file: Path, *, since: float = 0.0) -> Json | None:
    """Return what a tally has written, or None. What was written last before `since` (seconds since
    1970) counts as nothing."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    written = found.get("at") if isinstance(found, dict) else None
    return found if isinstance(written, int | float) and written >= since else None


def read_all_counts(files: Iterable[Path], *, since: float = 0.0) -> Json | None:
    """Return what several environments have written since then as if it came from one, or None:
    numbers are added, and the oldest sign of life and the newest group count."""
    found = [one for file in files if (one := read_counts(file, since=since)) is not None]
    if len(found) < 2:
        return found[0] if found else None
    together: Json = {"errors": {}, "zeros": {}}
    for one in found:
        for key, value in one.items():
            if key in ("errors", "zeros"):
                merge_counts(together[key], value)
            elif value is not None and (key == "at" or key.endswith("_since")):
                together[key] = min(together.get(key, value), value)
            elif value is not None and key == "group_at":
                together[key] = max(together.get(key, value), value)
            elif isinstance(value, int | float) and key != "pid":
                together[key] = together.get(key, 0) + value
    return together
