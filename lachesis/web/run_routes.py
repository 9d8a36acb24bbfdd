"""Serve the pages of one run: overview, metrics, settings and logs."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from lachesis.reporting.charts import list_metrics
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_logs import MAX_LINES, TAIL_LINES, choose_log, find_log, view_log
from lachesis.reporting.run_settings import list_settings
from lachesis.reporting.verdict_marks import choose_mark
from lachesis.web.curve_routes import read_curve_request
from lachesis.web.rendering import make_csv_response, make_page
from lachesis.web.run_overview import list_services, make_run_page


def show_run(request: Request) -> Response:
    """Answer with the overview of a run."""
    cache: RunCache = request.app.state.cache
    page = make_run_page(cache.view(request.path_params["run_id"]))
    run_dir = page.view.run_dir
    return make_page(
        request,
        "run.html.j2",
        section="runs",
        tab="overview",
        record=page.record,
        mark=page.verdict.mark,
        page=page,
        curve_request=read_curve_request(request),
        log=view_log(page.record, run_dir, choose_log(page.record), max_lines=TAIL_LINES),
    )


def show_metrics(request: Request) -> Response:
    """Answer with a curve of each metric of a run."""
    cache: RunCache = request.app.state.cache
    view = cache.view(request.path_params["run_id"])
    names = list_metrics(view.steps)
    search_text = request.query_params.get("q", "").casefold()
    return make_page(
        request,
        "run_metrics.html.j2",
        section="runs",
        tab="metrics",
        record=view.record,
        mark=choose_mark(view.record),
        metrics=[name for name in names if search_text in name.casefold()],
        num_metrics=len(names),
        text=search_text,
        curve_request=read_curve_request(request),
    )


def show_settings(request: Request) -> Response:
    """Answer with all settings of a run."""
    cache: RunCache = request.app.state.cache
    view = cache.view(request.path_params["run_id"])
    return make_page(
        request,
        "run_all_settings.html.j2",
        section="runs",
        tab="settings",
        record=view.record,
        mark=choose_mark(view.record),
        settings=list_settings(view.record, view.config) if view.config else [],
    )


def download_settings(request: Request) -> Response:
    """Answer with all settings of a run as CSV."""
    cache: RunCache = request.app.state.cache
    view = cache.view(request.path_params["run_id"])
    rows = list_settings(view.record, view.config) if view.config else []
    return make_csv_response(f"settings-{view.record.run_id}.csv", list(map(asdict, rows)))


def download_checkpoints(request: Request) -> Response:
    """Answer with the checkpoints of a run that are kept as CSV."""
    cache: RunCache = request.app.state.cache
    view = cache.view(request.path_params["run_id"])
    rows: list[dict[str, object]] = []
    for row in view.checkpoints:
        point = row.held_out.model_dump() if row.held_out else {}
        held_out = {f"held_out_{name}": value for name, value in point.items()}
        rows.append({**asdict(row), **held_out})
        del rows[-1]["held_out"]
    return make_csv_response(f"checkpoints-{view.record.run_id}.csv", rows)


def download_attempts(request: Request) -> Response:
    """Answer with the attempts of a run as CSV."""
    cache: RunCache = request.app.state.cache
    view = cache.view(request.path_params["run_id"])
    rows = [attempt.model_dump(mode="json") for attempt in view.attempts]
    return make_csv_response(f"attempts-{view.record.run_id}.csv", rows)


def show_log(request: Request) -> Response:
    """Answer with one log of a run, or the lines of it that contain a text."""
    cache: RunCache = request.app.state.cache
    record = cache.load_record(request.path_params["run_id"])
    run_dir = cache.store.dir(record.run_id)
    name = request.path_params.get("log") or choose_log(record)
    text = request.query_params.get("q", "")
    return make_page(
        request,
        "run_log.html.j2",
        section="runs",
        tab="logs",
        record=record,
        mark=choose_mark(record),
        services=list_services(record),
        log=view_log(record, run_dir, name, text=text, max_lines=MAX_LINES),
    )


def download_log(request: Request) -> Response:
    """Answer with a whole log as a text file."""
    cache: RunCache = request.app.state.cache
    record = cache.load_record(request.path_params["run_id"])
    file = find_log(record, cache.store.dir(record.run_id), request.path_params["log"])
    return FileResponse(file, media_type="text/plain", filename=file.name)


# The download stands before the page, whose pattern fits it too.
RUN_ROUTES = [
    Route("/runs/{run_id}", show_run),
    Route("/runs/{run_id}/metrics", show_metrics),
    Route("/runs/{run_id}/settings", show_settings),
    Route("/runs/{run_id}/settings.csv", download_settings),
    Route("/runs/{run_id}/checkpoints.csv", download_checkpoints),
    Route("/runs/{run_id}/attempts.csv", download_attempts),
    Route("/runs/{run_id}/logs", show_log),
    Route("/runs/{run_id}/logs/{log}.txt", download_log),
    Route("/runs/{run_id}/logs/{log}", show_log),
]
