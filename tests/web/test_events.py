"""The stream of events: new steps within two seconds, one watcher for many pages."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from lachesis.base import background_task
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_curves import CurveRequest
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunStore
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.web.app import create_app
from lachesis.web.live_updates import Broadcast, Broadcasts, LiveRun, LiveRunList
from tests.web.recorded import BEST, LIVING, fill_home, make_metrics

NAME = "reward/mean"


@pytest.fixture
def store(clean_environment: Path) -> RunStore:
    return fill_home(clean_environment)


def append_step(store: RunStore, step: int, reward: float = 0.5) -> None:
    MetricsFile(store.dir(LIVING).metrics).append(step, make_metrics(step, reward))


def test_new_steps_are_told_once(store: RunStore) -> None:
    live = LiveRun(RunCache(store), LIVING, (NAME, "nothing"), CurveRequest(mean_width=5))
    assert live.poll() == []
    append_step(store, 3, 0.5)
    append_step(store, 4, 0.9)
    ((name, content),) = live.poll()
    assert (name, content["run"], content["step"], content["seconds"]) == ("steps", LIVING, 4, 0.5)
    # The mean of the steps before has changed too.
    assert content["series"] == {
        NAME: {"x": [1, 2, 3, 4], "raw": [0.2, 0.2, 0.5, 0.9], "mean": [0.3, 0.45, 0.45, 0.53333]}
    }
    assert live.poll() == []


def test_steps_that_are_made_again_replace_the_old_ones(store: RunStore) -> None:
    cache = RunCache(store)
    live = LiveRun(cache, LIVING, (NAME,), CurveRequest(mean_width=1))
    append_step(store, 3)
    live.poll()
    append_step(store, 2, 0.7)  # a resumed run begins after a checkpoint
    ((_, content),) = live.poll()
    assert content["step"] == 2
    assert [step["step"] for step in cache.read_steps(LIVING)] == [1, 2]
    assert content["series"][NAME] == {"x": [2.0], "raw": [0.7]}


def test_the_end_of_a_run_is_told(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveRun(RunCache(store), LIVING, (NAME,), CurveRequest())
    store.update(LIVING, status="completed", health={"word": "healthy", "final": True})
    events = dict(live.poll())
    assert events["ended"] == {"status": "completed"}
    assert "It learned." in events["parts"]["verdict"]
    assert live.poll() == []


def test_the_verdict_is_rendered_every_few_seconds(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveRun(RunCache(store), LIVING, (), CurveRequest())
    append_step(store, 3)
    assert [name for name, _ in live.poll()] == ["steps"]
    live._rendered_at -= 60
    assert "step 3 of 10" in dict(live.poll())["parts"]["verdict"]


def test_a_list_is_told_that_it_has_changed(store: RunStore) -> None:
    live = LiveRunList(RunCache(store))
    live._sent_at -= 60
    assert live.poll() == []
    append_step(store, 3)
    assert live.poll() == [("changed", {})]
    store.update(BEST, note="new")
    assert live.poll() == [], "not more often than every few seconds"
    live._sent_at -= 60
    assert live.poll() == [("changed", {})]


# --- over HTTP


async def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait until something holds, for at most twenty seconds."""
    async with asyncio.timeout(20):
        while True:
            if is_true():
                return
            await asyncio.sleep(0.02)


@pytest.fixture
async def address(store: RunStore) -> AsyncIterator[str]:
    """A real server of the pages."""
    port = reserve_free_ports(1)[0]
    config = uvicorn.Config(create_app(store=store), port=port, log_level="warning")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    await asyncio.wait_for(task, 20)


async def read_events(address: str, wanted: str, names: list[str]) -> dict[str, Any]:
    """Return the content of the first event of a name; add the name of each event to `names`."""
    async with (
        httpx.AsyncClient(timeout=20) as client,
        client.stream("GET", f"{address}/runs/{LIVING}/events?metrics={NAME}") as stream,
    ):
        name = ""
        async for line in stream.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
                names.append(name)
            elif line.startswith("data: ") and name == wanted:
                return json.loads(line.removeprefix("data: "))  # type: ignore[no-any-return]
    raise AssertionError("the stream has ended")


async def test_ten_pages_hear_of_a_step_within_two_seconds(store: RunStore, address: str) -> None:
    names: list[str] = []
    pages = [asyncio.create_task(read_events(address, "steps", names)) for _ in range(10)]
    await wait_until(lambda: names.count("hello") == 10)
    append_step(store, 3)
    written_at = time.monotonic()
    contents = await asyncio.gather(*pages)
    assert time.monotonic() - written_at < 2
    assert [content["step"] for content in contents] == [3] * 10


async def test_one_watcher_serves_all_pages_and_ends_with_them(store: RunStore) -> None:
    broadcasts = Broadcasts()
    live = LiveRun(RunCache(store), LIVING, (NAME,), CurveRequest())
    streams = [broadcasts.stream("key", live, 0.05) for _ in range(3)]
    for stream in streams:
        assert (await anext(stream)).event == "hello"
    assert len(broadcasts._by_key) == 1
    append_step(store, 3)
    assert {(await anext(stream)).event for stream in streams} == {"steps"}
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    assert broadcasts.num_listeners == 0
    assert broadcasts._by_key == {}


async def test_a_slow_page_gets_the_newest_events(store: RunStore) -> None:
    class Counter(LiveRunList):
        count = 0

        def poll(self) -> list[tuple[str, dict[str, int]]]:
            self.count += 1
            return [("changed", {"count": self.count})]

    broadcast = Broadcast(Counter(RunCache(store)), 0.01)
    queue = broadcast.add()
    await wait_until(lambda: broadcast.source.count >= 20)  # type: ignore[union-attr]
    assert queue.qsize() <= 4
    assert json.loads((await queue.get()).data)["count"] > 10
    broadcast.remove(queue)


async def test_a_watch_that_fails_is_begun_again(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pages that listen would wait for ever otherwise."""
    monkeypatch.setattr(background_task, "FIRST_PAUSE_S", 0.01)

    class Failing(LiveRunList):
        count = 0

        def poll(self) -> list[tuple[str, dict[str, int]]]:
            self.count += 1
            if self.count == 1:
                raise OSError("the file system is away")
            return [("changed", {"count": self.count})]

    broadcast = Broadcast(Failing(RunCache(store)), 0.01)
    queue = broadcast.add()
    assert json.loads((await queue.get()).data)["count"] == 2
    assert "the watch of Failing has failed" in caplog.text
    broadcast.remove(queue)
