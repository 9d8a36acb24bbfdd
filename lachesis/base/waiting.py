"""Wait for a condition under a deadline, and stop waiting on an event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until the condition holds, and return whether it did within `timeout_s` seconds."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.25)
    return True


T = TypeVar("T")


async def run_unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or cancel it and return None when `stop` is set first."""
    task, stop_task = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        task.cancel()
        stop_task.cancel()
