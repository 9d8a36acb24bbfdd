"""Read where the blocked event loop of an environment stands.

`lachesis.env_process.loop_watch` writes the file; below its first line are stacks in the form of
the standard library's `faulthandler`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from lachesis.runs.environment_counts import read_counts

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
