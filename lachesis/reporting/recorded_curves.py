"""Gather the curves of runs for a report, which no server answers: every axis, and all points.

The script of the page takes means and parts of them. A very long run is thinned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lachesis.base.json_text import Json
from lachesis.reporting.curve_series import AXES, RunCurves, choose_points, to_numbers
from lachesis.runs.held_out_results import HeldOutPoint
from lachesis.runs.metrics import Step

MAX_RECORDED_STEPS = 4000


def record_curves(
    steps: Sequence[Step],
    metrics: Sequence[str],
    curve: Sequence[HeldOutPoint],
    checkpoints: Sequence[int],
    since: int | None = None,
) -> Json:
    """Return the metrics of a run with its held-out results and checkpoints on every axis.

    Args:
        steps: The metrics of all steps.
        metrics: Those of which curves are drawn.
        curve: The held-out results.
        checkpoints: The steps whose weights are kept.
        since: The step from which on the run went wrong, if it did.
    """
    curves = RunCurves(steps)
    chosen = np.arange(len(steps))
    if len(steps) > MAX_RECORDED_STEPS:
        rewards = np.nan_to_num(curves.get_values("reward/mean"))
        chosen = choose_points(curves.step_S, rewards, MAX_RECORDED_STEPS)
    names = {name for step in steps for name in step}
    return {
        "axes": {axis: to_numbers(curves.get_positions(axis)[chosen]) for axis in AXES},
        "metrics": {
            name: to_numbers(curves.get_values(name)[chosen]) for name in metrics if name in names
        },
        "held_out": [
            {**point.model_dump(), "x": {axis: curves.locate(point.step, axis) for axis in AXES}}
            for point in curve
        ],
        "since": since and {axis: curves.locate(since, axis) for axis in AXES},
        "checkpoints": [{axis: curves.locate(step, axis) for axis in AXES} for step in checkpoints],
    }
