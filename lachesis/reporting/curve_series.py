"""Prepare a metric of a run for a curve: its horizontal axis, a running mean, and fewer points.

A browser draws some hundred points across a page, so more are thinned here. The mean is taken
before: it is a mean over steps, whatever the zoom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tsdownsample

from lachesis.base.json_text import Json
from lachesis.base.reward_values import Array
from lachesis.runs.metrics import Step

Axis = Literal["step", "tokens", "time"]
AXES: tuple[Axis, ...] = ("step", "tokens", "time")
# Steps that a mean may be taken over.
MEAN_WIDTHS = (1, 5, 15, 45)
DEFAULT_MEAN_WIDTH = 15
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

    def __init__(self, steps: Sequence[Step], *, earlier: Sequence[Step] = ()) -> None:
        """Take the steps of a run; `earlier` are those before, of which no curve is made."""
        self.steps = steps
        self.earlier_s = sum(step.get("time/step") or 0.0 for step in earlier)
        self.step_S: Array = np.array([step["step"] for step in steps], np.float64)

    def get_values(self, metric: str) -> Array:
        """Return the metric of every step; NaN where a step has none."""
        return np.array(
            [np.nan if (value := step.get(metric)) is None else value for step in self.steps],
            np.float64,
        )

    def get_positions(self, axis: Axis) -> Array:
        """Return where each step lies on the axis: its number, tokens so far, or seconds so far.

        Seconds are those of training; the time between two attempts does not count.
        """
        if axis == "tokens":
            totals = [np.nan_to_num(self.get_values(name)) for name in TOKEN_TOTALS]
            return np.maximum.accumulate(sum(totals, np.zeros(len(self.steps))))
        if axis == "time":
            return self.earlier_s + np.cumsum(np.nan_to_num(self.get_values("time/step")))
        return self.step_S

    def locate(self, step: float, axis: Axis) -> float:
        """Return where the end of a step lies on the axis."""
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

    def make_tail(self, metric: str, request: CurveRequest, num_steps: int) -> Json | None:
        """Return the series of the last steps with all of their points; None if none has it."""
        values = self.get_values(metric)
        means = average_around(values, self.step_S, request.mean_width)
        x = self.get_positions(request.axis)
        is_shown = np.isfinite(values)
        is_shown[:-num_steps] = False
        if not is_shown.any():
            return None
        tail: Json = {"x": to_numbers(x[is_shown]), "raw": to_numbers(values[is_shown])}
        if request.mean_width > 1:
            tail["mean"] = to_numbers(means[is_shown])
        return tail


def _is_between(x: Array, first: float | None, last: float | None) -> Array:
    """Return which places lie in the shown part, with a neighbour on each side of it."""
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
