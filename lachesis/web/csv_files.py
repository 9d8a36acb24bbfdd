"""Answer with tables as files of comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from starlette.responses import Response


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
