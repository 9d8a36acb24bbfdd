"""Serve the list of runs as a page and as CSV."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_filter import RunFilter, select_runs
from lachesis.reporting.run_summary import RunSummary
from lachesis.web.csv_files import make_csv_response
from lachesis.web.page_responses import make_page
from lachesis.web.run_list import build_run_list


def show_run_list(request: Request) -> Response:
    """Answer with the page of the runs that the address asks for."""
    cache: RunCache = request.app.state.cache
    page = build_run_list(cache, RunFilter.from_query(request.query_params))
    return make_page(request, "runs.html.j2", section="runs", page=page)


def download_run_list(request: Request) -> Response:
    """Answer with all runs that the address asks for as CSV, a column per setting."""
    cache: RunCache = request.app.state.cache
    wanted = RunFilter.from_query(request.query_params)
    records = select_runs(cache.list_records(), wanted, cache.summarize)
    return make_csv_response("runs.csv", [_make_row(cache.summarize(record)) for record in records])


def _make_row(summary: RunSummary) -> dict[str, object]:
    """Return what is known of one run, with all of its settings."""
    record, point = summary.record, summary.held_out
    return {
        "run_id": record.run_id,
        "name": record.name,
        "environment": record.environment,
        "status": record.status,
        "health": record.learning,
        "created_at": record.created_at,
        "steps": summary.step,
        "first_reward": summary.reward.get("first"),
        "last_reward": summary.reward.get("last"),
        "held_out": point.percent_correct if point else None,
        "held_out_items": point.items if point else None,
        "held_out_low": point.low if point else None,
        "held_out_high": point.high if point else None,
        "seconds": summary.duration_s,
        "tokens": summary.tokens,
        "cost_usd": summary.cost_usd,
        "tags": " ".join(record.tags),
        "note": record.note,
        **summary.settings,
    }


RUN_LIST_ROUTES = [
    Route("/runs", show_run_list),
    Route("/runs.csv", download_run_list),
]
