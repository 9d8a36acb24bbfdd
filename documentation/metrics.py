"""Describe every metric of a run, from its table."""

from __future__ import annotations

from itertools import groupby

from documentation.markdown import make_table
from lachesis.runs.metric_names import METRIC_MEANINGS

METRICS_HEAD = """# Metrics

For whoever reads a curve, `metrics.jsonl`, or W&B: what each number means, and its unit.

A run writes one line per step. A step may stand in the file twice, because a resumed run makes the
steps after its checkpoint again and a late evaluation adds its result in a further line; the last
line of a step counts. `lachesis metrics RUN --csv` prints each step once. `NAME` stands for a name
that the environment or the server chooses.
"""


def render_metrics() -> str:
    """Return the page of all metrics, a table per first part of their names."""
    parts = [METRICS_HEAD]
    by_part = groupby(METRIC_MEANINGS.items(), key=lambda item: item[0].partition("/")[0])
    for part, items in by_part:
        rows = [(f"`{name}`", meaning) for name, meaning in items]
        parts += [f"## {part}", "", make_table(("metric", "meaning"), rows), ""]
    return "\n".join(parts)
