"""Choose the curves of runs, with as many points as a drawing can show.

A browser draws some hundred points across a page, so more are thinned. The running mean is taken
before, so it is a mean over steps, whatever the zoom.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tsdownsample

from lachesis.base.arrays import Array
from lachesis.base.json_text import Json
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_headline import find_first_bad_step
from lachesis.reporting.run_view import RunView
from lachesis.runs.held_out_results import HeldOutPoint
from lachesis.runs.metrics import Step


def build_curves(
    cache: RunCache, run_id: str, metrics: Sequence[str], wanted: "CurveRequest"
) -> Json:
    """Return the series of each metric that the run has, its held-out results and checkpoints.

    Raises:
        UnknownRunError: There is no such run.
    """
    view = cache.view(run_id)
    curves = RunCurves(view.steps)
    series = {name: curves.make_series(name, wanted) for name in metrics}
    return {
        "step": view.summary.step,
        "total": view.record.total_steps,
        "series": {name: value for name, value in series.items() if value},
        **locate_marks(view, wanted.axis),
    }


def locate_marks(view: RunView, axis: "Axis") -> Json:
    """Return the positions of held-out results, kept checkpoints and the first bad step of a
    run."""
    curves, since = RunCurves(view.steps), find_first_bad_step(view.record)
    return {
        "since": None if since is None else curves.locate(since, axis),
        "held_out": [
            {"x": curves.locate(point.step, axis), **point.model_dump()} for point in view.curve
        ],
        "checkpoints": [curves.locate(manifest.step, axis) for manifest in view.manifests],
    }


Axis = Literal["step", "tokens", "time"]
AXES: tuple[Axis, ...] = ("step", "tokens", "time")
# Steps that a mean may be taken over.
MEAN_WIDTHS = (1, 5, 15, 45)
DEFAULT_MEAN_WIDTH = 15
# Points of each curve in a report.
MAX_RECORDED_POINTS = 1500
TOKEN_TOTALS = ("tokens/prefill_total", "tokens/sampled_total", "tokens/trained_total")
SIGNIFICANT_DIGITS = 5


@dataclass(frozen=True)
class CurveRequest:
    """Say how curves are drawn."""

    axis: Axis = "step"
    mean_width: int = DEFAULT_MEAN_WIDTH
    """Steps of the centred mean; 1 is none."""
    first: float | None = None
    """Where the shown part begins, in units of the axis."""
    last: float | None = None
    max_points: int = 600


class RunCurves:
    """Hold the metrics of a run as arrays, of which curves are made."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.step_S: Array = np.array([step["step"] for step in steps], np.float64)

    def get_values(self, metric: str) -> Array:
        """Return the metric of every step; NaN where a step has none."""
        return np.array(
            [np.nan if (value := step.get(metric)) is None else value for step in self.steps],
            np.float64,
        )

    def get_positions(self, axis: Axis) -> Array:
        """Return the position of each step on the axis: its number, tokens so far, or seconds so
        far.

        Seconds are those of training; the time between two attempts does not count.
        """
        if axis == "tokens":
            totals = [np.nan_to_num(self.get_values(name)) for name in TOKEN_TOTALS]
            return np.maximum.accumulate(sum(totals, np.zeros(len(self.steps))))
        if axis == "time":
            return np.cumsum(np.nan_to_num(self.get_values("time/step")))
        return self.step_S

    def locate(self, step: float, axis: Axis) -> float:
        """Return the position of the end of a step on the axis."""
        if axis == "step" or not len(self.step_S):
            return step
        positions = self.get_positions(axis)
        return float(np.interp(step, [0.0, *self.step_S], [0.0, *positions]))

    def make_series(self, metric: str, request: CurveRequest) -> Json | None:
        """Return `x`, `raw` and, with a mean, `mean` of one metric; None if no step has it."""
        values = self.get_values(metric)
        is_known = np.isfinite(values)
        if not is_known.any():
            return None
        means = average_around(values, self.step_S, request.mean_width)
        x = self.get_positions(request.axis)
        is_shown = is_known & _is_between(x, request.first, request.last)
        x, values, means = x[is_shown], values[is_shown], means[is_shown]
        chosen = choose_points(x, values, request.max_points)
        series: Json = {"x": to_numbers(x[chosen]), "raw": to_numbers(values[chosen])}
        if request.mean_width > 1:
            series["mean"] = to_numbers(means[chosen])
        return series

    def record(self, metric: str) -> Json | None:
        """Return one curve with all of its means; None if no step has the metric.

        Returns:
            `places`, the drawn steps by their index; `raw`, their values; and `means` of these
                values by the number of steps around each.
        """
        values = self.get_values(metric)
        places = np.flatnonzero(np.isfinite(values))
        if not len(places):
            return None
        places = places[choose_points(self.step_S[places], values[places], MAX_RECORDED_POINTS)]
        means = {
            str(width): to_numbers(average_around(values, self.step_S, width)[places])
            for width in MEAN_WIDTHS
            if width > 1
        }
        return {"places": places, "raw": to_numbers(values[places]), "means": means}


def _is_between(x: Array, first: float | None, last: float | None) -> Array:
    """Return which positions are in the shown part, with a neighbour on each side."""
    low = -np.inf if first is None else first
    high = np.inf if last is None else last
    inside = np.flatnonzero((x >= low) & (x <= high))
    is_shown: Array = np.zeros(len(x), bool)
    if len(inside):
        is_shown[max(0, inside[0] - 1) : inside[-1] + 2] = True
    return is_shown


def average_around(values: Array, steps: Array, width: int) -> Array:
    """Return the mean of `width` steps around each step; at an end of those that there are.

    Steps without a value count as none. A mean does not reach across missing steps.
    """
    if width < 2 or not len(values):
        return values
    half = (width - 1) // 2
    # Differences of running sums give all windows at once, whatever their width.
    is_known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_known)])
    places = np.arange(len(values))
    breaks = np.flatnonzero(np.diff(steps) != 1) + 1
    starts = np.concatenate([[0], breaks])
    ends = np.concatenate([breaks, [len(values)]])
    part = np.searchsorted(starts, places, side="right") - 1
    low = np.maximum(places - half, starts[part])
    high = np.minimum(places + half + 1, ends[part])
    with np.errstate(invalid="ignore"):
        means: Array = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return means


def choose_points(x: Array, values: Array, max_points: int) -> Array:
    """Return which points to draw, at most `max_points`, such that peaks stay (MinMaxLTTB).

    J. Van Der Donckt and others, "MinMaxLTTB: Leveraging MinMax-Preselection to Scale LTTB", 2023.
    """
    if len(x) <= max_points:
        return np.arange(len(x))
    downsampler = tsdownsample.MinMaxLTTBDownsampler()  # type: ignore[no-untyped-call]
    chosen = downsampler.downsample(x, values, n_out=max_points)
    return np.unique(np.asarray(chosen, np.int64))


def to_numbers(values: Array) -> list[Any]:
    """Return numbers with few digits for a browser; None for those that are not finite."""
    return [
        None if not np.isfinite(value) else float(f"{value:.{SIGNIFICANT_DIGITS}g}")
        for value in values.tolist()
    ]


def record_curves(
    steps: Sequence[Step],
    metrics: Sequence[str],
    curve: Sequence[HeldOutPoint],
    checkpoints: Sequence[int],
    since: int | None = None,
) -> Json:
    """Return the curves of a run for a report, which can ask no server.

    Args:
        steps: The metrics of all steps.
        metrics: Those of which curves are drawn.
        curve: The held-out results.
        checkpoints: The steps whose weights are kept.
        since: The step from which on the run went wrong, if it did.

    Returns:
        `axes` with the positions of the drawn steps, `metrics` with the curve of each metric (see
            `RunCurves.record`), and where held-out results and checkpoints lie on each axis.
    """
    curves = RunCurves(steps)
    recorded = {name: series for name in metrics if (series := curves.record(name))}
    drawn = np.unique(np.concatenate([[], *(series["places"] for series in recorded.values())]))
    drawn = drawn.astype(np.int64)
    for series in recorded.values():
        series["places"] = np.searchsorted(drawn, series["places"]).tolist()
    return {
        "axes": {axis: to_numbers(curves.get_positions(axis)[drawn]) for axis in AXES},
        "metrics": recorded,
        "held_out": [
            {**point.model_dump(), "x": {axis: curves.locate(point.step, axis) for axis in AXES}}
            for point in curve
        ],
        "since": since and {axis: curves.locate(since, axis) for axis in AXES},
        "checkpoints": [{axis: curves.locate(step, axis) for axis in AXES} for step in checkpoints],
    }
