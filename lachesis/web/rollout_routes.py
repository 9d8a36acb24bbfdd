"""Serve the rollouts of a run as a page and as CSV."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.reporting.run_cache import RunCache
from lachesis.web.csv_files import make_csv_response
from lachesis.web.page_responses import make_page
from lachesis.web.rollout_page import RolloutFilter, build_rollout_page, list_group_rows


def show_rollouts(request: Request) -> Response:
    """Answer with the groups of rollouts that the address asks for."""
    cache: RunCache = request.app.state.cache
    wanted = RolloutFilter.from_query(request.query_params)
    page = build_rollout_page(cache, request.path_params["run_id"], wanted)
    return make_page(
        request,
        "rollouts.html.j2",
        section="runs",
        tab="rollouts",
        record=page.record,
        mark=page.mark,
        page=page,
    )


def download_groups(request: Request) -> Response:
    """Answer with all groups that the address asks for as CSV."""
    cache: RunCache = request.app.state.cache
    record = cache.load_record(request.path_params["run_id"])
    wanted = RolloutFilter.from_query(request.query_params)
    rows = list_group_rows(cache, record.run_id, wanted)
    return make_csv_response(f"rollouts-{record.run_id}.csv", rows)


ROLLOUT_ROUTES = [
    Route("/runs/{run_id}/rollouts", show_rollouts),
    Route("/runs/{run_id}/rollouts.csv", download_groups),
]
