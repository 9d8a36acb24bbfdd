"""Prepare all curves of a run for a page, with its held-out results and its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis.base.json_text import Json
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.reporting.curve_series import Axis, CurveRequest, RunCurves
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.trouble import find_first_bad_step
from lachesis.runs.held_out_results import build_run_curve


def build_curves(
    cache: RunCache, run_id: str, metrics: Sequence[str], wanted: CurveRequest
) -> Json:
    """Return the series of each metric that the run has, its held-out results and checkpoints.

    Raises:
        UnknownRunError: There is no such run.
    """
    record, steps = cache.load_record(run_id), cache.read_steps(run_id)
    curves = RunCurves(steps)
    series = {name: curves.make_series(name, wanted) for name in metrics}
    return {
        "step": steps[-1]["step"] if steps else 0,
        "total": record.total_steps,
        "series": {name: value for name, value in series.items() if value},
        **locate_marks(cache, run_id, wanted.axis),
    }


def locate_marks(cache: RunCache, run_id: str, axis: Axis) -> Json:
    """Return where held-out results, kept checkpoints and the first bad step of a run lie."""
    record, steps, run_dir = (
        cache.load_record(run_id),
        cache.read_steps(run_id),
        cache.store.dir(run_id),
    )
    curves = RunCurves(steps)
    since = find_first_bad_step(record)
    return {
        "since": None if since is None else curves.locate(since, axis),
        "held_out": [
            {"x": curves.locate(point.step, axis), **point.model_dump()}
            for point in build_run_curve(record, run_dir, steps)
        ],
        "checkpoints": [
            curves.locate(manifest.step, axis)
            for manifest in Checkpoints(run_dir.checkpoints).list_intact()
        ],
    }
