"""Render pages from templates, and answer with pages, CSV and static files."""

import csv
import functools
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from lachesis.base import formatting
from lachesis.reporting.verdict_marks import choose_mark
from lachesis.runs.held_out_results import describe_interval
from lachesis.web.inline_svg import draw_interval

# Styles and scripts of the pages, with the libraries that they use.
STATIC_FOLDER = Path(__file__).parent / "static"


@functools.cache
def get_environment() -> jinja2.Environment:
    """Return the templates with the filters by which they write numbers."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lachesis.web", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["is_report"] = False
    environment.filters.update(
        reward=formatting.format_reward,
        choose_mark=choose_mark,
        interval=describe_interval,
        interval_drawing=draw_interval,
        percent=formatting.format_percent,
        setting=formatting.format_setting,
        moment=formatting.format_moment,
        day_and_time=formatting.format_day_and_time,
        in_words=formatting.count_in_words,
        enumerated=formatting.join_words,
        duration=formatting.format_duration,
        bytes=formatting.format_bytes,
        dollars=formatting.format_dollars,
        shortened=formatting.shorten_count,
        as_option=lambda value: (value, value),
    )
    return environment


def render_page(name: str, **values: object) -> str:
    """Return the page of a template with these values."""
    return get_environment().get_template(name).render(**values)


def make_csv_response(name: str, rows: Sequence[Mapping[str, object]]) -> Response:
    """Return rows as a file of comma-separated values with a line of titles.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    # Runs on different environments have different settings, so the rows have different titles.
    buffer = io.StringIO()
    titles = list(dict.fromkeys(title for row in rows for title in row))
    writer = csv.DictWriter(buffer, titles)
    writer.writeheader()
    for row in rows:
        writer.writerow({title: _guard_formula(value) for title, value in row.items()})
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(buffer.getvalue(), media_type="text/csv", headers=headers)


def _guard_formula(value: object) -> object:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value


# Characters that need no escape in a query; the addresses stay readable.
READABLE = ",/:@><=!"


def make_page(
    request: Request,
    template: str,
    *,
    section: str,
    status: int = 200,
    tag: str = "",
    **values: object,
) -> HTMLResponse:
    """Return the page of a template.

    Args:
        request: The request that it answers.
        template: The file of the template.
        section: The part of the bar that the page belongs to.
        status: The HTTP status.
        tag: The tag by which an open page asks whether it has changed; empty for no such page.
        values: What the template shows.
    """
    # A page is made anew for each request, so a browser must not keep it.
    page = render_page(
        template,
        static=get_static_prefix(),
        section=section,
        address=make_address_function(request),
        tag=tag,
        **values,
    )
    headers = {"Cache-Control": "no-store", "Vary": "HX-Request"}
    if tag:
        headers["ETag"] = tag
    if request.headers.get("hx-request") and "if-none-match" not in request.headers:
        # Empty fields of a form do not belong into the address bar.
        headers["HX-Push-Url"] = make_address_function(request)()
    return HTMLResponse(page, status_code=status, headers=headers)


def make_address_function(request: Request) -> Callable[..., str]:
    """Return a function that makes the address of this page with some fields changed."""

    def make_address(base: str | None = None, **changes: object) -> str:
        """Return the address of the page with some parameters changed; empty ones are left out."""
        query = {**dict(request.query_params), **changes}
        parts = [
            f"{quote(name, safe=READABLE)}={quote(str(value), safe=READABLE)}"
            for name, value in query.items()
            if value not in (None, "")
        ]
        path = base or request.url.path
        return f"{path}?{'&'.join(parts)}" if parts else path

    return make_address


ONE_YEAR = "public, max-age=31536000, immutable"


@functools.cache
def get_static_prefix() -> str:
    """Return the path of the files, with a hash of all of them: a browser may keep them."""
    digest = hashlib.sha256()
    for file in sorted(STATIC_FOLDER.rglob("*")):
        if file.is_file():
            digest.update(file.read_bytes())
    return f"/static/{digest.hexdigest()[:12]}"


class KeptStaticFiles(StaticFiles):
    """Serve the files with the permission to keep them."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return the answer for one file."""
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = ONE_YEAR
        return response


def make_static_app() -> KeptStaticFiles:
    """Return the application that serves the files."""
    return KeptStaticFiles(directory=STATIC_FOLDER)
