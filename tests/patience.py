"""How long a test waits for what will happen: a success costs none of it, and a slow machine beside
other work needs more.
"""

from __future__ import annotations

import time

SLOW = 3
LONG_S = 20
"""Shorter waits say how soon something has to happen."""
POLL_S = 0.01
"""How often a test's HTTP server looks whether it shall end; the library's half a second is paid in
every teardown.
"""


def deadline(timeout_s: float) -> float:
    """When to give up, on the monotonic clock."""
    return time.monotonic() + (timeout_s * SLOW if timeout_s >= LONG_S else timeout_s)
