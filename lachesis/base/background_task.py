"""Keep a background task running that nobody waits for."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)
# Seconds before a task is started again; they double while it goes on failing.
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0


async def keep_running(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do a work that should never end; log its end, and begin it again, until this is cancelled.

    Args:
        name: What the log calls it.
        work: Makes the awaitable for each try.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        began_at = time.monotonic()
        try:
            await work()
            log.error("%s has ended; it begins again in %.0f s", name, pause_s)
        except Exception:
            log.exception("%s has failed; it begins again in %.0f s", name, pause_s)
        if time.monotonic() - began_at > MAX_PAUSE_S:
            pause_s = FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
