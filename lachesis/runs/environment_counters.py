"""Read the counts of environment processes, and the line at which a blocked process stands."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from lachesis.base.json_text import Json
from lachesis.environment_toolkit.failure_reasons import merge_counts


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


MAX_STACK_BYTES = 200_000
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>\S+)')


def find_blocked_line(counters_files: Iterable[Path], *, since: float = 0.0) -> str | None:
    """Return the line at which the environment that has been silent for longest stands.

    Args:
        counters_files: The counts of a run's environments.
        since: Files that were last written before this Unix time are of an earlier attempt.

    Returns:
        `function() at FILE:LINE` in the environment's own folder if a frame is there, else the
        innermost frame; None if the event loop is not blocked.
    """
    writing_times = {
        file: counts["written_at"]
        for file in counters_files
        if (counts := read_counts(file, since=since)) is not None
    }
    if not writing_times:
        return None
    silent_file = min(writing_times, key=lambda file: float(writing_times[file]))
    return _read_blocked_line(silent_file.with_suffix(".stack"))


def _read_blocked_line(stack_file: Path) -> str | None:
    """Return the function, file and line in which the event loop stands; None if it does not."""
    try:
        with stack_file.open("rb") as file:
            text = file.read(MAX_STACK_BYTES).decode(errors="replace")
    except OSError:
        return None
    header, _, stacks = text.partition("\n")
    thread, _, folder = header.partition(" ")
    own_stacks = [stack for stack in stacks.split("\n\n") if thread in stack.partition("\n")[0]]
    if not thread or not own_stacks:
        return None
    frames = [match for line in own_stacks[-1].splitlines() if (match := FRAME.match(line))]
    own_frames = [frame for frame in frames if Path(frame["file"]).is_relative_to(folder)]
    if not frames:
        return None
    frame = (own_frames or frames)[0]
    return f"{frame['function']}() at {frame['file']}:{frame['line']}"
