"""Serve the comparison of runs as a page and as CSV."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.reporting.run_cache import RunCache
from lachesis.web.compare_page import build_compare_page
from lachesis.web.csv_files import make_csv_response
from lachesis.web.curve_routes import read_curve_request
from lachesis.web.page_responses import make_page


def show_comparison(request: Request) -> Response:
    """Answer with the comparison of the runs that the address names."""
    cache: RunCache = request.app.state.cache
    shows_equal = bool(request.query_params.get("all"))
    return make_page(
        request,
        "compare.html.j2",
        section="compare",
        page=build_compare_page(cache, read_run_ids(request), shows_equal=shows_equal),
        curve_request=read_curve_request(request),
    )


def download_comparison(request: Request) -> Response:
    """Answer with the settings and results of the runs as CSV, a column per run."""
    cache: RunCache = request.app.state.cache
    page = build_compare_page(cache, read_run_ids(request), shows_equal=True)
    run_ids = [column.record.run_id for column in page.columns]
    rows = [
        {"name": row.name, **dict(zip(run_ids, row.values, strict=True))}
        for row in (*page.settings, *page.equal, *page.results)
    ]
    return make_csv_response("comparison.csv", rows)


def read_run_ids(request: Request) -> list[str]:
    """Return the runs that an address names: `runs=a,b`, or `runs=a&runs=b` as forms send it."""
    texts = request.query_params.getlist("runs")
    return list(dict.fromkeys(name for text in texts for name in text.split(",") if name))


COMPARE_ROUTES = [
    Route("/compare", show_comparison),
    Route("/compare.csv", download_comparison),
]
