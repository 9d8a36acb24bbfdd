"""Answer requests with pages, and with the addresses that a page links to."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse

from lachesis.web.static_files import get_static_prefix
from lachesis.web.templates import render_page

# Characters that need no escape in a query; the addresses stay readable.
READABLE = ",/:@><=!"


def make_page(
    request: Request, template: str, *, section: str, status: int = 200, **values: object
) -> HTMLResponse:
    """Return the page of a template; `section` is the part of the bar that it belongs to."""
    # A page is made anew for each request, so a browser must not keep it.
    page = render_page(
        template,
        static=get_static_prefix(),
        section=section,
        address=make_address_function(request),
        **values,
    )
    headers = {"Cache-Control": "no-store", "Vary": "HX-Request"}
    is_refresh = "x-refresh" in request.headers
    if request.headers.get("hx-request") and not is_refresh:
        # Empty fields of a form do not belong into the address bar.
        headers["HX-Push-Url"] = make_address_function(request)()
    return HTMLResponse(page, status_code=status, headers=headers)


def make_address_function(request: Request) -> Callable[..., str]:
    """Return a function that makes the address of this page with some fields changed."""

    def make_address(base: str | None = None, **changes: object) -> str:
        query = {**dict(request.query_params), **changes}
        parts = [
            f"{name}={quote(str(value), safe=READABLE)}"
            for name, value in query.items()
            if value not in (None, "")
        ]
        path = base or request.url.path
        return f"{path}?{'&'.join(parts)}" if parts else path

    return make_address
