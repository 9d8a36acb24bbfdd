"""Put styles, scripts and data into a page that is one file.

The page allows exactly these scripts, by their hashes, and nothing from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from lachesis import __version__
from lachesis.base.files import storage_errors, write_private
from lachesis.base.json_text import Json, to_compact_json
from lachesis.base.timestamps import now_iso
from lachesis.reporting.curve_series import CurveRequest
from lachesis.web.templates import STATIC_FOLDER, render_page

STYLES = ("vendor/uPlot.min.css", "frame.css", "parts.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "page.js", "curves.js")


@dataclass(frozen=True)
class ReportAssets:
    """Hold what a report carries with it; all of it is written by this program."""

    theme: Markup
    styles: Markup
    scripts: Markup
    data: Markup
    script_sources: Markup
    """The hashes of the scripts for the policy of the page."""


def make_report_assets(data: Json) -> ReportAssets:
    """Return the assets of a report with the data of its curves."""
    theme = _read("theme.js")
    scripts = "\n".join(map(_read, SCRIPTS))
    # In JSON the sign can be escaped, so that no text of a run ends the element.
    text = to_compact_json(data).replace("<", "\\u003c")
    sources = " ".join(f"'sha256-{_compute_hash(script)}'" for script in (theme, scripts))
    return ReportAssets(
        Markup(theme),
        Markup("\n".join(map(_read, STYLES))),
        Markup(scripts),
        Markup(text),
        Markup(sources),
    )


def write_report_file(file: Path, template: str, data: Json, **values: object) -> None:
    """Write a page that is one file.

    Args:
        file: The file to write.
        template: The template of the page.
        data: The curves of each run by its id; see `lachesis.reporting.recorded_curves`.
        values: What the template shows.

    Raises:
        StorageError: The file cannot be written.
    """
    text = render_page(
        template,
        is_report=True,
        assets=make_report_assets(data),
        # Nothing of a report has an address.
        address=lambda **changes: "#",
        curve_request=CurveRequest(),
        version=__version__,
        written_at=now_iso(),
        **values,
    )
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written atomically, because somebody may be reading the previous page.
        write_private(file, text)


def _read(name: str) -> str:
    return (STATIC_FOLDER / name).read_text(encoding="utf-8")


def _compute_hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
