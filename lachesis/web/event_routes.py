"""Send what changes to open pages, as server-sent events.

One task watches each run, however many pages show it: it looks at the time and size of the run's
files, reads the lines that were added, and sends the same text to every page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable
from typing import Any

import anyio.to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.base.json_text import to_compact_json
from lachesis.reporting.run_cache import RunCache
from lachesis.web.curve_routes import read_curve_request
from lachesis.web.live_run import LiveLog, LiveRun, LiveRunList

# Seconds between two looks at the files of a run, and at those of all runs.
RUN_INTERVAL_S, LIST_INTERVAL_S = 0.7, 2.0
# Seconds between two lines that say the connection lives.
PING_S = 15
# Events that wait for a slow page; an older one is dropped, as the next one replaces it.
MAX_WAITING_EVENTS = 4
MAX_STREAMS = 200


Source = LiveRun | LiveLog | LiveRunList


class Broadcast:
    """Poll a source while pages listen, and give each of its events to all of them."""

    def __init__(self, source: Source, interval_s: float) -> None:
        self.source, self.interval_s = source, interval_s
        self.listeners: set[asyncio.Queue[ServerSentEvent]] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self) -> asyncio.Queue[ServerSentEvent]:
        """Return a queue that gets the events from now on."""
        queue: asyncio.Queue[ServerSentEvent] = asyncio.Queue(MAX_WAITING_EVENTS)
        self.listeners.add(queue)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        return queue

    def remove(self, queue: asyncio.Queue[ServerSentEvent]) -> None:
        """Stop giving events to a queue; without listeners nothing is polled."""
        self.listeners.discard(queue)
        if not self.listeners and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _poll(self) -> None:
        while True:
            for name, content in await anyio.to_thread.run_sync(self.source.poll):
                event = ServerSentEvent(event=name, data=to_compact_json(content))
                # A page may go away while others are given the event.
                for queue in list(self.listeners):
                    if queue.full():
                        queue.get_nowait()
                    queue.put_nowait(event)
            # Files are looked at and not watched: a watch does not work on every file system.
            await asyncio.sleep(self.interval_s)


class Broadcasts:
    """Hold the broadcasts that pages listen to, by what they watch."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Broadcast] = {}

    async def stream(
        self, key: Hashable, source: Source, interval_s: float
    ) -> AsyncIterator[ServerSentEvent]:
        """Yield the events of a broadcast until the page goes away."""
        broadcast = self._by_key.setdefault(key, Broadcast(source, interval_s))
        queue = broadcast.add()
        try:
            yield ServerSentEvent(event="hello", data=to_compact_json({"time": time.time()}))
            while True:
                yield await queue.get()
        finally:
            broadcast.remove(queue)
            if not broadcast.listeners:
                self._by_key.pop(key, None)

    @property
    def num_listeners(self) -> int:
        """Return how many pages listen."""
        return sum(len(broadcast.listeners) for broadcast in self._by_key.values())


def stream_run(request: Request) -> Response:
    """Answer with the events of one run: new steps, and parts of its page that have changed."""
    cache: RunCache = request.app.state.cache
    record = cache.load_record(request.path_params["run_id"])
    wanted = read_curve_request(request)
    metrics = tuple(filter(None, request.query_params.get("metrics", "").split(",")))
    key = (record.run_id, wanted.axis, wanted.mean_width, metrics)
    source = LiveRun(cache, record.run_id, metrics, wanted)
    return _make_stream(request, key, source, RUN_INTERVAL_S)


def stream_log(request: Request) -> Response:
    """Answer with the end of one log of a run whenever something was written to it."""
    cache: RunCache = request.app.state.cache
    run_id, name = request.path_params["run_id"], request.path_params["log"]
    source = LiveLog(cache, run_id, name)
    return _make_stream(request, (run_id, "log", name), source, RUN_INTERVAL_S)


def stream_run_list(request: Request) -> Response:
    """Answer with an event whenever a run of the list has changed."""
    cache: RunCache = request.app.state.cache
    return _make_stream(request, "runs", LiveRunList(cache), LIST_INTERVAL_S)


def _make_stream(request: Request, key: Hashable, source: Source, interval_s: float) -> Response:
    broadcasts: Broadcasts = request.app.state.broadcasts
    if broadcasts.num_listeners >= MAX_STREAMS:
        return Response("too many open pages", status_code=503)
    events: Any = broadcasts.stream(key, source, interval_s)
    return EventSourceResponse(events, ping=PING_S, headers={"Cache-Control": "no-store"})


EVENT_ROUTES = [
    Route("/runs/events", stream_run_list),
    Route("/runs/{run_id}/events", stream_run),
    Route("/runs/{run_id}/logs/{log}/events", stream_log),
]
