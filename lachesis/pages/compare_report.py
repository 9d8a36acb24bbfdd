"""Write the comparison of runs as one file that needs no server."""

from __future__ import annotations

from pathlib import Path

from lachesis import __version__
from lachesis.base.files import storage_errors, write_private
from lachesis.base.timestamps import now_iso
from lachesis.pages.compare_page import make_compare_page
from lachesis.pages.curve_series import CurveRequest
from lachesis.pages.recorded_curves import record_curves
from lachesis.pages.report_assets import make_report_assets
from lachesis.pages.templates import render_page
from lachesis.reporting.comparison import Comparison


def write_comparison(comparison: Comparison, file: Path) -> None:
    """Write the page that compares runs.

    Raises:
        ArgumentsError: There are more runs than a page can tell apart.
        StorageError: The file cannot be written.
    """
    page = make_compare_page(comparison)
    metrics = [metric for chart in page.charts for metric in chart.metrics]
    data = {
        run.record.run_id: record_curves(run.steps, metrics, run.curve, [])
        for run in comparison.runs
    }
    text = render_page(
        "compare_report.html.j2",
        page=page,
        is_report=True,
        assets=make_report_assets(data),
        address=lambda **changes: "#",
        curve_request=CurveRequest(),
        version=__version__,
        written_at=now_iso(),
    )
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, text)
