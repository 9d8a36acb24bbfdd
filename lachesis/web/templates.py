"""Render the templates of the pages.

What models and environments wrote is text: every value is escaped. Only this program's own styles
and scripts are not; see `lachesis.web.report_assets`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jinja2

from lachesis.base.formatting import format_bytes, format_duration, shorten_count
from lachesis.web import wording

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
        reward=wording.format_reward,
        interval=wording.format_interval,
        percent=wording.format_percent,
        setting=wording.format_setting,
        moment=wording.format_moment,
        day_and_time=wording.format_day_and_time,
        in_words=wording.count_in_words,
        enumerated=wording.join_words,
        duration=format_duration,
        bytes=format_bytes,
        shortened=shorten_count,
        as_option=lambda value: (value, value),
    )
    return environment


def render_page(name: str, **values: object) -> str:
    """Return the page of a template with these values."""
    return get_environment().get_template(name).render(**values)
