"""Draw curves for the pages of Prefect, which show images but no SVG elements.

The ground is transparent and the colours have a middle tone, so that a curve can be read on dark
and on light pages. The SVG is written here because a plotting library takes a hundred times longer,
and each tick of the monitor draws curves of every run.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 26, 40
BLUE, ORANGE, GREY = "#3b82f6", "#d97706", "#8a94a6"
SMOOTHED_POINTS = 10
MAX_TICKS = 5
TEXT_STYLE = f'font-family="sans-serif" font-size="12" fill="{GREY}"'


@dataclass(frozen=True)
class Axes:
    """Map steps and values to the pixels of an image."""

    first_step: float
    last_step: float
    low: float
    high: float

    def x(self, step: float) -> float:
        """Return the horizontal pixel of a step."""
        share = (step - self.first_step) / ((self.last_step - self.first_step) or 1)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Return the vertical pixel of a value."""
        share = (value - self.low) / ((self.high - self.low) or 1)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def draw(self, title: str) -> list[str]:
        """Return the lines, numbers and labels of both axes."""
        parts = [f'<text x="{LEFT}" y="15" {TEXT_STYLE}>{html.escape(title)}</text>']
        bottom = HEIGHT - BOTTOM
        for value in _choose_ticks(self.low, self.high):
            y = self.y(value)
            parts.append(_draw_line(LEFT, y, WIDTH - RIGHT, y, GREY, "0.5"))
            parts.append(
                f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end" {TEXT_STYLE}>{value:g}</text>'
            )
        for step in _choose_ticks(self.first_step, self.last_step, whole=True):
            parts.append(
                f'<text x="{self.x(step)}" y="{bottom + 16}" text-anchor="middle" {TEXT_STYLE}>'
                f"{step:g}</text>"
            )
        middle = (LEFT + WIDTH - RIGHT) // 2
        label = f'x="{middle}" y="{HEIGHT - 6}" text-anchor="middle"'
        parts.append(f"<text {label} {TEXT_STYLE}>training step</text>")
        return parts


def render_reward_curve(steps: Sequence[int], rewards: Sequence[float]) -> str:
    """Return a Markdown image of the mean reward by step, with a moving average; an empty text for
    fewer than two steps.
    """
    if len(steps) < 2:
        return ""
    axes = Axes(steps[0], steps[-1], *_widen(min(rewards), max(rewards)))
    means = [
        sum(window) / len(window)
        for end in range(1, len(rewards) + 1)
        if (window := rewards[max(0, end - SMOOTHED_POINTS) : end])
    ]
    parts = axes.draw(f"mean reward (score per rollout); blue: mean of {SMOOTHED_POINTS} points")
    parts.append(_draw_curve(axes, steps, rewards, GREY, 1))
    parts.append(_draw_curve(axes, steps, means, BLUE, 2.5))
    return _to_image(parts, f"mean reward by step, from {rewards[0]:.3f} to {rewards[-1]:.3f}")


def render_held_out_curve(
    steps: Sequence[int],
    shares: Sequence[float],
    intervals: Sequence[tuple[float, float] | None],
) -> str:
    """Return a Markdown image of the held-out results by step, with their 95 % intervals; an empty
    text for fewer than two results.
    """
    if len(steps) < 2:
        return ""
    axes = Axes(steps[0], steps[-1], 0.0, 1.0)
    parts = axes.draw("held-out items that are correct (share); bars: 95 % interval")
    parts.append(_draw_curve(axes, steps, shares, ORANGE, 2))
    for step, share, interval in zip(steps, shares, intervals, strict=True):
        x = axes.x(step)
        parts.append(f'<circle cx="{x}" cy="{axes.y(share)}" r="3.5" fill="{ORANGE}"/>')
        if interval is not None:
            low, high = map(axes.y, interval)
            parts.append(_draw_line(x, low, x, high, ORANGE, "2"))
    return _to_image(parts, f"held-out results by step, from {shares[0]:.3f} to {shares[-1]:.3f}")


def _widen(low: float, high: float) -> tuple[float, float]:
    """Return limits with some room, also for a curve that is flat."""
    room = (high - low) * 0.06 or 0.5
    return low - room, high + room


def _choose_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return round numbers from `low` to `high`, at most six of them."""
    rough_gap = (high - low) / MAX_TICKS or 1.0
    power = 10.0 ** math.floor(math.log10(rough_gap))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough_gap)
    if whole:
        gap = max(1.0, round(gap))
    first = math.ceil(low / gap)
    return [round(index * gap, 10) for index in range(first, math.floor(high / gap) + 1)]


def _draw_line(x1: float, y1: float, x2: float, y2: float, colour: str, width: str) -> str:
    ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _draw_curve(
    axes: Axes, steps: Sequence[int], values: Sequence[float], colour: str, width: float
) -> str:
    pairs = zip(steps, values, strict=True)
    points = " ".join(f"{axes.x(step)},{axes.y(value)}" for step, value in pairs)
    return f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{points}"/>'


def _to_image(parts: Sequence[str], description: str) -> str:
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'
    encoded = base64.b64encode(svg.encode()).decode()
    return f"![{description}](data:image/svg+xml;base64,{encoded})"
