"""Serve the points of curves as JSON for the pages, and all values as CSV."""

import math

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.base.errors import ArgumentsError
from lachesis.base.json_text import to_compact_json
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_curves import (
    AXES,
    DEFAULT_MEAN_WIDTH,
    MEAN_WIDTHS,
    CurveRequest,
    build_curves,
)
from lachesis.reporting.run_list import MAX_COMPARED_RUNS, read_count
from lachesis.web.rendering import make_csv_response

# More would be a mistake, or an attempt to keep the server busy.
MAX_METRICS, MAX_POINTS, DEFAULT_POINTS = 200, 4000, 600


def read_curve_request(request: Request) -> CurveRequest:
    """Return the request for curves of an address; unknown parameters are ignored."""
    query = request.query_params
    axis, mean_width = query.get("x", "step"), query.get("mean", "")
    points = query.get("points", "")
    return CurveRequest(
        axis=axis if axis in AXES else "step",
        mean_width=int(mean_width) if mean_width in map(str, MEAN_WIDTHS) else DEFAULT_MEAN_WIDTH,
        first=_read_number(query.get("from")),
        last=_read_number(query.get("to")),
        max_points=min(MAX_POINTS, read_count(points) or DEFAULT_POINTS),
    )


def send_curves(request: Request) -> Response:
    """Answer with the curves of some metrics of some runs."""
    cache: RunCache = request.app.state.cache
    curve_request = read_curve_request(request)
    metrics = _split(request, "metrics", MAX_METRICS)
    runs = {
        run_id: build_curves(cache, run_id, metrics, curve_request)
        for run_id in _split(request, "runs", MAX_COMPARED_RUNS)
    }
    answer = {"axis": curve_request.axis, "mean": curve_request.mean_width, "runs": runs}
    headers = {"Cache-Control": "no-store"}
    return Response(to_compact_json(answer), media_type="application/json", headers=headers)


def download_curves(request: Request) -> Response:
    """Answer with every value of some metrics of some runs as CSV, a line per step."""
    cache: RunCache = request.app.state.cache
    metrics = _split(request, "metrics", MAX_METRICS)
    rows: list[dict[str, object]] = []
    for run_id in _split(request, "runs", MAX_COMPARED_RUNS):
        for step in cache.view(run_id).steps:
            values = {name: step.get(name) for name in metrics}
            rows.append({"run_id": run_id, "step": step["step"], "time": step.get("time")} | values)
    return make_csv_response("curves.csv", rows)


def _split(request: Request, name: str, max_items: int) -> list[str]:
    """Return the items of a list in the address.

    Raises:
        ArgumentsError: There are none, or too many.
    """
    items = list(dict.fromkeys(filter(None, request.query_params.get(name, "").split(","))))
    if not 1 <= len(items) <= max_items:
        raise ArgumentsError(
            f"{len(items)} {name} were asked for; allowed: 1 to {max_items}, separated by commas, "
            f"as in ?{name}=a,b"
        )
    return items


def _read_number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


CURVE_ROUTES = [Route("/curves.json", send_curves), Route("/curves.csv", download_curves)]
