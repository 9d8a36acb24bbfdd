"""Render the HTML templates of this package, and charts as SVG for them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import jinja2

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render_template(name: str, **values: object) -> str:
    """Return the page of a template with these values.

    What models and environments have written is text and never markup.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lachesis.reporting", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values)


def render_svg(figure: Figure) -> str:
    """Return a chart as an SVG element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
