"""Send what changes on a page while a run trains, as server-sent events.

One task watches each run, however many pages show it: it looks at the time and size of the run's
files, reads the lines that were added, and sends the same text to every page.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Hashable, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.base.background_task import keep_running
from lachesis.base.json_text import Json, to_compact_json
from lachesis.reporting.run_cache import RunCache, stat_file
from lachesis.reporting.run_curves import CurveRequest, RunCurves, locate_marks
from lachesis.reporting.run_logs import MAX_LINES, choose_log, find_log, view_log
from lachesis.web.curve_routes import read_curve_request
from lachesis.web.rendering import render_page
from lachesis.web.run_overview import make_run_page

# Seconds between two renderings of the verdict and of a list, which cost more than new points.
PARTS_INTERVAL_S, LIST_INTERVAL_S = 4.0, 4.0
Event = tuple[str, Json]


class LiveRun:
    """Watch one run for the pages that show it the same way."""

    def __init__(
        self, cache: RunCache, run_id: str, metrics: Sequence[str], request: CurveRequest
    ) -> None:
        self.cache, self.run_id, self.metrics, self.request = cache, run_id, metrics, request
        self.run_dir = cache.store.dir(run_id)
        self._last_step = self._get_last_step()
        self._file_states: tuple[Any, ...] = self._read_file_states()
        self._rendered: dict[str, str] = {}
        self._rendered_at = time.monotonic()
        self._has_ended = cache.load_record(run_id).has_ended

    def poll(self) -> list[Event]:
        """Return the events since the last call."""
        file_states = self._read_file_states()
        is_due = time.monotonic() - self._rendered_at >= PARTS_INTERVAL_S
        if file_states == self._file_states and not is_due:
            return []
        events: list[Event] = []
        if file_states != self._file_states:
            self._file_states = file_states
            events += self._make_step_events()
        record = self.cache.load_record(self.run_id)
        ends_now = record.has_ended and not self._has_ended
        if is_due or ends_now:
            events += self._make_part_events()
        if ends_now:
            events.append(("ended", {"status": record.status}))
        self._has_ended = record.has_ended
        return events

    def _read_file_states(self) -> tuple[Any, ...]:
        return tuple(map(stat_file, (self.run_dir.metrics, self.run_dir.record)))

    def _get_last_step(self) -> int:
        return self.cache.view(self.run_id).summary.step

    def _make_step_events(self) -> list[Event]:
        """Return the last points of each curve: the new ones, and those whose mean they change."""
        view = self.cache.view(self.run_id)
        steps = view.steps
        if not steps or steps[-1]["step"] == self._last_step:
            return []
        num_new = max(1, steps[-1]["step"] - self._last_step)
        half = self.request.mean_width // 2
        # A centred mean changes for the steps before the new ones too.
        num_tail = max(1, min(len(steps), num_new + half))
        # The mean of the first point of the tail needs steps before it.
        curves = RunCurves(steps[-(num_tail + half) :], earlier=steps[: -(num_tail + half)])
        series = {
            name: tail
            for name in self.metrics
            if (tail := curves.make_tail(name, self.request, num_tail))
        }
        self._last_step = steps[-1]["step"]
        content = {
            "run": self.run_id,
            "step": self._last_step,
            "seconds": steps[-1].get("time/step"),
            "series": series,
            **locate_marks(view, self.request.axis),
        }
        return [("steps", content)]

    def _make_part_events(self) -> list[Event]:
        """Return the parts of the page that read otherwise than before, as HTML by id."""
        self._rendered_at = time.monotonic()
        page = make_run_page(self.cache.view(self.run_id))
        log = view_log(page.record, self.run_dir, choose_log(page.record))
        rendered = {
            "verdict": render_page("live_verdict.html.j2", page=page),
            "amounts": render_page("run_amounts.html.j2", page=page),
            "service-logs": render_page("live_logs.html.j2", page=page, log=log),
        }
        changed = {
            name: text for name, text in rendered.items() if text != self._rendered.get(name)
        }
        self._rendered = rendered
        return [("parts", changed)] if changed else []


class LiveLog:
    """Watch one log of a run for the pages that show its end."""

    def __init__(self, cache: RunCache, run_id: str, name: str) -> None:
        """Take the log of this name.

        Raises:
            ConfigError: The run has no log of this name.
        """
        self.cache, self.run_id, self.name = cache, run_id, name
        self.file = find_log(cache.load_record(run_id), cache.store.dir(run_id), name)
        self._file_state = stat_file(self.file)

    def poll(self) -> list[Event]:
        """Return the end of the log if something was written since the last call."""
        record = self.cache.load_record(self.run_id)
        file_state, events = stat_file(self.file), list[Event]()
        if file_state != self._file_state:
            self._file_state = file_state
            run_dir = self.cache.store.dir(self.run_id)
            log = view_log(record, run_dir, self.name, max_lines=MAX_LINES)
            events.append(("parts", {"log-lines": render_page("log_lines.html.j2", log=log)}))
        if record.has_ended:
            events.append(("ended", {"status": record.status}))
        return events


class LiveRunList:
    """Watch all runs for the pages that list them."""

    def __init__(self, cache: RunCache) -> None:
        self.cache = cache
        self._file_states = self._read_file_states()
        self._sent_at = time.monotonic()

    def poll(self) -> list[Event]:
        """Return one event if a run has changed since the last one."""
        if time.monotonic() - self._sent_at < LIST_INTERVAL_S:
            return []
        file_states = self._read_file_states()
        if file_states == self._file_states:
            return []
        self._file_states, self._sent_at = file_states, time.monotonic()
        return [("changed", {})]

    def _read_file_states(self) -> dict[str, Any]:
        """Return the state of the files of each run; an ended one only has its record."""
        try:
            folders = [Path(entry) for entry in os.scandir(self.cache.store.root)]
        except FileNotFoundError:
            return {}
        living = {record.run_id for record in self.cache.list_records() if not record.has_ended}
        return {
            folder.name: (
                stat_file(folder / "run.json"),
                stat_file(folder / "metrics.jsonl") if folder.name in living else None,
            )
            for folder in folders
        }


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
            name = f"the watch of {type(self.source).__name__}"
            self._task = asyncio.create_task(keep_running(name, self._poll))
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
    curve_request = read_curve_request(request)
    metrics = tuple(filter(None, request.query_params.get("metrics", "").split(",")))
    key = (record.run_id, curve_request.axis, curve_request.mean_width, metrics)
    source = LiveRun(cache, record.run_id, metrics, curve_request)
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
