"""Wait for a condition under a deadline."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until the condition holds, and return whether it did within `timeout_s` seconds."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.25)
    return True
