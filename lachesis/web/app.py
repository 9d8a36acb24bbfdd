"""Put the pages together to one application: guard, sign-in, headers, routes and error pages."""

import contextlib
import difflib
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route

from lachesis.base.errors import (
    ConfigError,
    LachesisError,
    UnknownRunError,
    UnknownTestError,
    shorten,
)
from lachesis.base.http_guard import ASGIApp, HttpGuard, Scope
from lachesis.operations.run_lists import refresh_unsettled
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_list import RunFilter
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.web.comparison_page import COMPARE_ROUTES
from lachesis.web.curves import CURVE_ROUTES
from lachesis.web.environments_page import ENVIRONMENT_ROUTES
from lachesis.web.rendering import get_static_prefix, make_page, make_static_app
from lachesis.web.rollouts_page import ROLLOUT_ROUTES
from lachesis.web.run_list_page import RUN_LIST_ROUTES, build_run_list
from lachesis.web.run_page import RUN_ROUTES
from lachesis.web.sign_in import SignInGate


def create_app(
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    allowed_hosts: Iterable[str] = (),
    store: RunStore | None = None,
) -> ASGIApp:
    """Return the ASGI application that serves the pages of a home.

    Args:
        host: The address that it listens on; requests for other hosts are refused.
        token: What a person or a program must know to read the pages; None opens them to all
            programs of this machine.
        allowed_hosts: Further names of this server.
        store: The runs; by default those of this home.
    """
    app = _create_routes()
    # One cache for all pages, so that a second look at a run costs nothing.
    runs = store or RunStore()
    app.state.cache = RunCache(runs, lambda: refresh_unsettled(runs))
    # The token is checked by the gate, which can ask a person for it; the guard does the rest.
    gate = SignInGate(GZipMiddleware(app, minimum_size=1000), token)
    guard = HttpGuard(
        SecurityHeaders(gate), host=host, token=None, allowed_hosts=allowed_hosts, serves_pages=True
    )
    return guard


def _create_routes() -> Starlette:
    """Return the pages without what stands before them."""
    return Starlette(
        routes=[
            Route("/", lambda request: RedirectResponse("/runs")),
            Mount(get_static_prefix(), make_static_app()),
            *RUN_LIST_ROUTES,
            *RUN_ROUTES,
            *ROLLOUT_ROUTES,
            *COMPARE_ROUTES,
            *CURVE_ROUTES,
            *ENVIRONMENT_ROUTES,
        ],
        exception_handlers={LachesisError: _show_lachesis_error, HTTPException: _show_http_error},
        lifespan=_read_ahead,
    )


@contextlib.asynccontextmanager
async def _read_ahead(app: Starlette) -> AsyncIterator[None]:
    """Read the runs of the first page while the browser is still being opened."""
    cache: RunCache = app.state.cache
    threading.Thread(target=build_run_list, args=(cache, RunFilter()), daemon=True).start()
    yield


def _show_lachesis_error(request: Request, error: Any) -> Response:
    """Answer with what went wrong; an unknown run with the names that are nearest to it."""
    if type(error) is UnknownRunError:
        page = build_missing_run(request.app.state.cache, request.path_params.get("run_id", ""))
        return make_page(request, "missing_run.html.j2", section="runs", status=404, page=page)
    if isinstance(error, UnknownTestError):
        status = 404
    else:
        status = 400 if isinstance(error, ConfigError) else 500
    return make_page(
        request, "error.html.j2", section="", status=status, error=str(error), code=error.code
    )


def _show_http_error(request: Request, error: Any) -> Response:
    """Return the page of an error."""
    text = "There is no such page." if error.status_code == 404 else str(error.detail)
    return make_page(
        request,
        "error.html.j2",
        section="",
        status=error.status_code,
        error=text,
        code=f"http_{error.status_code}",
    )


CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
# The older headers are for browsers that do not know all of the policy.
HEADERS = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class SecurityHeaders:
    """Wrap an application and add the headers to all of its answers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        await self.app(scope, receive, send_with_headers)


@dataclass(frozen=True)
class MissingRun:
    """Hold the parts of the page about an unknown run."""

    run_id: str
    nearest: RunRecord | None
    num_runs: int


def build_missing_run(cache: RunCache, run_id: str) -> MissingRun:
    """Return the run whose id or name is most similar to an unknown name, and the number of
    runs."""
    records = cache.list_records()
    # A person may have typed the id or the name.
    names = {record.run_id: record for record in records}
    names |= {record.name: record for record in records if record.name}
    matches = difflib.get_close_matches(run_id, list(names), n=1, cutoff=0.5)
    nearest = names[matches[0]] if matches else None
    return MissingRun(shorten(run_id, 40), nearest, len(records))
