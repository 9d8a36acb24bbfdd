"""Put the pages together to one application: guard, sign-in, headers, routes and error pages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route

from lachesis.base.errors import ConfigError, LachesisError, UnknownRunError, UnknownTestError
from lachesis.base.http_guard import ASGIApp, HttpGuard
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_filter import RunFilter
from lachesis.runs.store import RunStore
from lachesis.web.compare_routes import COMPARE_ROUTES
from lachesis.web.curve_routes import CURVE_ROUTES
from lachesis.web.environment_routes import ENVIRONMENT_ROUTES
from lachesis.web.event_routes import EVENT_ROUTES, Broadcasts
from lachesis.web.missing_run import build_missing_run
from lachesis.web.page_responses import make_page
from lachesis.web.rollout_routes import ROLLOUT_ROUTES
from lachesis.web.run_list import build_run_list
from lachesis.web.run_list_routes import RUN_LIST_ROUTES
from lachesis.web.run_routes import RUN_ROUTES
from lachesis.web.security_headers import SecurityHeaders
from lachesis.web.sign_in import SignInGate
from lachesis.web.static_files import get_static_prefix, make_static_app


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
    app.state.cache = RunCache(store or RunStore())
    app.state.broadcasts = Broadcasts()
    # The token is checked by the gate, which can ask a person for it; the guard does the rest.
    gate = SignInGate(GZipMiddleware(app, minimum_size=1000), token)
    guard = HttpGuard(
        SecurityHeaders(gate),
        host=host,
        token=None,
        allowed_hosts=allowed_hosts,
        serves_pages=True,
    )
    return guard


def _create_routes() -> Starlette:
    """Return the pages without what stands before them."""
    return Starlette(
        routes=[
            Route("/", lambda request: RedirectResponse("/runs")),
            Mount(get_static_prefix(), make_static_app()),
            *EVENT_ROUTES,
            *RUN_LIST_ROUTES,
            *RUN_ROUTES,
            *ROLLOUT_ROUTES,
            *COMPARE_ROUTES,
            *CURVE_ROUTES,
            *ENVIRONMENT_ROUTES,
        ],
        exception_handlers={
            LachesisError: _show_lachesis_error,
            HTTPException: _show_http_error,
        },
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
    text = "There is no such page." if error.status_code == 404 else str(error.detail)
    return make_page(
        request,
        "error.html.j2",
        section="",
        status=error.status_code,
        error=text,
        code=f"http_{error.status_code}",
    )
