"""Find what has changed on a page since the last look: new steps, and parts with other words."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lachesis.base.json_text import Json
from lachesis.reporting.curve_series import CurveRequest, RunCurves
from lachesis.reporting.run_cache import RunCache, stat_file
from lachesis.reporting.run_curves import locate_marks
from lachesis.reporting.run_logs import MAX_LINES, choose_log, find_log, view_log
from lachesis.web.run_overview import build_run_page
from lachesis.web.templates import render_page

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
        steps = self.cache.read_steps(self.run_id)
        return steps[-1]["step"] if steps else 0

    def _make_step_events(self) -> list[Event]:
        """Return the last points of each curve: the new ones, and those whose mean they change."""
        steps = self.cache.read_steps(self.run_id)
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
            **locate_marks(self.cache, self.run_id, self.request.axis),
        }
        return [("steps", content)]

    def _make_part_events(self) -> list[Event]:
        """Return the parts of the page that read otherwise than before, as HTML by id."""
        self._rendered_at = time.monotonic()
        page = build_run_page(self.cache, self.run_id)
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
