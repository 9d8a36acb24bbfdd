"""Limits of time that count only what the limited code takes itself, and not what it waits for samples or for its turn."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Iterator

_limit: contextvars.ContextVar[asyncio.Timeout | None] = contextvars.ContextVar("limit", default=None)


@contextlib.asynccontextmanager
async def limited(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, without the time that is spent in `uncounted`."""
    async with asyncio.timeout(seconds) as limit:
        before = _limit.set(limit)
        try:
            yield limit
        finally:
            _limit.reset(before)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """The limit around this block, if there is one, stands still meanwhile."""
    limit, clock = _limit.get(), asyncio.get_running_loop().time
    until = limit.when() if limit is not None and not limit.expired() else None
    if limit is None or until is None:  # none, or it stands still already
        yield
        return
    left = until - clock()
    limit.reschedule(None)
    try:
        yield
    finally:
        if not limit.expired():
            limit.reschedule(clock() + left)
