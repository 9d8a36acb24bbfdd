"""A background task that ends is begun again, and the log says so."""

import asyncio
import contextlib
from types import SimpleNamespace

from lachesis.base import background_task
from lachesis.base.background_task import keep_running


def test_a_task_that_fails_or_ends_is_begun_again(monkeypatch, caplog):
    begun: list[int] = []
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def wait(seconds):
        pauses.append(seconds)
        await sleep(0)

    async def work():
        begun.append(1)
        if len(begun) == 1:
            raise AttributeError("a private field of Prefect is gone")
        if len(begun) > 8:
            await sleep(600)

    async def main():
        task = asyncio.create_task(keep_running("the watch", work))
        while len(begun) < 9:
            await sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    # Other threads of this process sleep too, so that only this module gets the substitute.
    monkeypatch.setattr(background_task, "asyncio", SimpleNamespace(sleep=wait))
    asyncio.run(main())
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    first, second = caplog.records[:2]
    assert first.message == "the watch has failed; it begins again in 1 s"
    assert first.exc_info
    assert second.message == "the watch has ended; it begins again in 2 s"
