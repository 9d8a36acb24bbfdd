"""Say why the Tinker server makes a run wait, from what its trainer has noted."""

from __future__ import annotations

import json
import time

from lachesis.base.formatting import format_duration
from lachesis.runs.folder import RunDir
from lachesis.runs.record import RunRecord

# A pause that was noted longer ago is over.
MAX_PAUSE_AGE_S = 30.0


def describe_pause(record: RunRecord, run_dir: RunDir) -> str | None:
    """Return why the Tinker server makes a run wait, and since when, or None."""
    if record.has_ended:
        return None
    try:
        pause = json.loads(run_dir.server_pause.read_text())
        last_at, since = float(pause["last_at"]), float(pause["since"])
        reason, refusals = str(pause["reason"]), int(pause["refusals"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if time.time() - last_at > MAX_PAUSE_AGE_S:
        return None
    return (
        f"the Tinker server makes it wait: {reason} (since {format_duration(last_at - since)}, "
        f"{refusals} times); it goes on by itself"
    )
