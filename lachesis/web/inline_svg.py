"""Compute the small pictures beside numbers: sparklines, intervals and meters, as SVG attributes.

The pages allow no inline style, so everything that data decides is a path or a coordinate.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lachesis.runs.held_out_results import HeldOutPoint

# The size of a sparkline and the room that its dot needs.
SPARK_WIDTH, SPARK_HEIGHT, SPARK_MARGIN = 96, 28, 2.5
MAX_SPARK_POINTS = 40


@dataclass(frozen=True)
class Sparkline:
    """Hold a line through the mean rewards of a run, and the dot at its end."""

    path: str
    end_x: str
    end_y: str


def draw_sparkline(samples: Sequence[tuple[int, float]], total_steps: int) -> Sparkline | None:
    """Return the line through samples of a reward by step, or None without samples.

    The scale is from 0 to 1, and farther where the samples are.

    Args:
        samples: Steps and values, in order.
        total_steps: The steps that the whole width stands for; a run that goes on has a shorter
            line.
    """
    if not samples:
        return None
    values = [value for _, value in samples]
    low, high = min(0.0, *values), max(1.0, *values)
    span = high - low
    points = []
    for step, value in average_neighbours(samples, MAX_SPARK_POINTS):
        x = SPARK_MARGIN + (SPARK_WIDTH - 2 * SPARK_MARGIN) * min(1.0, step / max(1, total_steps))
        share = min(1.0, max(0.0, (value - low) / span))
        y = SPARK_HEIGHT - SPARK_MARGIN - (SPARK_HEIGHT - 2 * SPARK_MARGIN) * share
        points.append((f"{x:.1f}", f"{y:.1f}"))
    path = "M" + "L".join(f"{x} {y}" for x, y in points)
    return Sparkline(path, *points[-1])


def average_neighbours(
    samples: Sequence[tuple[int, float]], max_points: int
) -> list[tuple[float, float]]:
    """Return at most `max_points` points, each the mean of neighbouring samples."""
    count = min(max_points, len(samples))
    bounds = [round(index * len(samples) / count) for index in range(count + 1)]
    points = []
    for start, end in itertools.pairwise(bounds):
        part = samples[start:end]
        middle = sum(step for step, _ in part) / len(part)
        points.append((middle, sum(value for _, value in part) / len(part)))
    # The line begins and ends where the run does.
    points[0] = (samples[0][0], points[0][1])
    points[-1] = (samples[-1][0], points[-1][1])
    return points


@dataclass(frozen=True)
class IntervalDrawing:
    """Hold a share with its interval on an axis from 0 to 1, in units of the axis' width."""

    low: str
    high: str
    share: str


def draw_interval(
    point: HeldOutPoint | None, width: float, margin: float
) -> IntervalDrawing | None:
    """Return where the ends and the middle of an interval are; without ends they are the share."""
    if point is None:
        return None

    def place(share: float) -> str:
        return f"{margin + (width - 2 * margin) * min(1.0, max(0.0, share)):.1f}"

    # Without a number of items there is no interval, only the share.
    low = point.percent_correct if point.low is None else point.low
    high = point.percent_correct if point.high is None else point.high
    return IntervalDrawing(place(low), place(high), place(point.percent_correct))
