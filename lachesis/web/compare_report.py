"""Write the comparison of runs as one file that needs no server."""

from __future__ import annotations

from pathlib import Path

from lachesis.reporting.comparison import Comparison
from lachesis.reporting.recorded_curves import record_curves
from lachesis.web.compare_page import make_compare_page
from lachesis.web.report_assets import write_report_file


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
    write_report_file(file, "compare_report.html.j2", data, page=page)
