"""Answer an open page that asks every two seconds, by htmx, whether it has changed.

A page has the tag of the files that it shows, and sends the tag back. While no file has changed the
answer is 304 and nothing is made; else it is the page, of which htmx replaces what differs.
"""

import hashlib
import time
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from lachesis.base.formatting import format_duration
from lachesis.reporting.run_cache import RunCache, stat_file
from lachesis.reporting.run_view import RunView
from lachesis.web.rendering import get_static_prefix


def make_tag(request: Request, *states: object) -> str:
    """Return the tag of a page that shows these states at the address of a request."""
    text = repr((get_static_prefix(), request.url.path, request.url.query, states))
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:16]}"'


def answer_unchanged(request: Request, tag: str) -> Response | None:
    """Return the answer to a page that has this tag already; None if it has changed."""
    if request.headers.get("if-none-match") != tag:
        return None
    return Response(status_code=304, headers={"ETag": tag, "Cache-Control": "no-store"})


def read_run_state(view: RunView, log: str) -> tuple[object, ...]:
    """Return the states of what the page of a living run shows.

    Args:
        view: The run.
        log: The name of the log whose end the page shows.
    """
    run_dir = view.run_dir
    files = (run_dir.record, run_dir.metrics, run_dir.get_log_file(log))
    return (*map(stat_file, files), describe_pace(view))


def read_list_state(cache: RunCache) -> tuple[object, ...]:
    """Return the states of the files of all runs; the steps of living runs count too.

    The list says when each run began in words that change by the minute.
    """
    root, records = cache.store.root, cache.list_records()
    files: list[Path] = []
    for record in records:
        folder = root / record.run_id
        files.append(folder / "run.json")
        if not record.has_ended:
            files.append(folder / "metrics.jsonl")
    return (len(records), int(time.time() // 60), *map(stat_file, files))


def describe_pace(view: RunView) -> str:
    """Return the newest step of a living run, and how old it is if the next one is late."""
    if not view.steps:
        return view.record.status
    late_s = view.late_s
    if late_s is None:
        return f"step {view.last_step['step']:,}"
    return f"no step for {format_duration(late_s)}"
