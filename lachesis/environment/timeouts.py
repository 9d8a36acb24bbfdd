"""Limits of time that count only what the limited code takes itself, and not what it waits for
samples or for its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Iterator

_current_timeout: contextvars.ContextVar[asyncio.Timeout | None] = contextvars.ContextVar(
    "limit", default=None
)


@contextlib.asynccontextmanager
async def pausable_timeout(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, without the time that is spent in `uncounted`."""
    async with asyncio.timeout(seconds) as timeout:
        token = _current_timeout.set(timeout)
        try:
            yield timeout
        finally:
            _current_timeout.reset(token)


@contextlib.contextmanager
def pause_timeout() -> Iterator[None]:
    """The limit around this block, if there is one, stands still meanwhile."""
    timeout, loop_time = _current_timeout.get(), asyncio.get_running_loop().time
    deadline = timeout.when() if timeout is not None and not timeout.expired() else None
    if timeout is None or deadline is None:  # none, or it stands still already
        yield
        return
    remaining_s = deadline - loop_time()
    timeout.reschedule(None)
    try:
        yield
    finally:
        if not timeout.expired():
            timeout.reschedule(loop_time() + remaining_s)
