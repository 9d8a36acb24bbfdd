"""Send a signal to a whole process group, which may have ended already."""

from __future__ import annotations

import contextlib
import os


def signal_group(leader_pid: int, signal_number: int) -> None:
    """Send a signal to the group of this leader, or do nothing if the group has ended."""
    # macOS returns EPERM for a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader_pid, signal_number)
