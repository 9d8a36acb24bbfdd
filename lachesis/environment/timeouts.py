"""Limit the time of code without counting its waits for samples or for a free sandbox."""

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
    """Limit the time of a block like `asyncio.timeout`, not counting time inside
    `pause_timeout`.
    """
    async with asyncio.timeout(seconds) as timeout:
        token = _current_timeout.set(timeout)
        try:
            yield timeout
        finally:
            _current_timeout.reset(token)


@contextlib.contextmanager
def pause_timeout() -> Iterator[None]:
    """Stop the clock of the `pausable_timeout` around this block, if there is one."""
    timeout, loop_time = _current_timeout.get(), asyncio.get_running_loop().time
    if timeout is not None and not timeout.expired():
        deadline = timeout.when()
    else:
        deadline = None
    if timeout is None or deadline is None:  # There is no limit, or its clock is stopped already.
        yield
        return
    remaining_s = deadline - loop_time()
    timeout.reschedule(None)
    try:
        yield
    finally:
        if not timeout.expired():
            timeout.reschedule(loop_time() + remaining_s)
