"""Read and describe results on held-out items: a share with its number of items and its
interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from lachesis.base.intervals import wilson_interval

Step = Mapping[str, Any]
# Names that environments use for the share of correct answers, the preferred one first.
ACCURACY_NAMES = ("percent_correct", "accuracy", "acc", "pass@1")


class HeldOutPoint(BaseModel):
    """Hold the share of correct answers on held-out items with the weights of one step."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    step: int
    """The step of the weights that were evaluated; 0 is the model before training."""
    percent_correct: float
    """Share of correct answers, from 0 to 1."""
    items: int | None = None
    """Number of held-out items; null when it is not known."""
    low: float | None = None
    """Lower end of the 95 % interval (Wilson); null without a number of items."""
    high: float | None = None
    """Upper end of the same interval."""


def compute_interval(percent_correct: float, items: float | None) -> dict[str, float]:
    """Return `items`, `low` and `high` of a share, or nothing where its interval is not defined.

    Several answers to one item are not independent, so the number of items counts, not that of
    answers.
    """
    if items is None or items < 1 or not 0 <= percent_correct <= 1:
        return {}
    num_items = int(items)
    low, high = wilson_interval(percent_correct * num_items, num_items)
    return {"items": num_items, "low": round(low, 4), "high": round(high, 4)}


def find_accuracy(metrics: Mapping[str, float | None]) -> float | None:
    """Return the share of correct answers among the metrics of one evaluation, or None."""
    for name in ACCURACY_NAMES:
        value = metrics.get(f"eval/{name}")
        if value is not None:
            return value
    return None


def to_point(metrics: Mapping[str, float | None], step: int) -> HeldOutPoint | None:
    """Return the result in the metrics of one evaluation, or None if they name no share."""
    accuracy = find_accuracy(metrics)
    if accuracy is None:
        return None
    return HeldOutPoint(
        step=step, percent_correct=accuracy, **compute_interval(accuracy, metrics.get("eval/items"))
    )


def build_held_out_curve(
    steps: Sequence[Step], environment: str | None = None
) -> list[HeldOutPoint]:
    """Return the held-out results in the lines of the metrics, in order of the evaluated steps.

    Args:
        steps: Lines of `metrics.jsonl` in order.
        environment: One of a run's further environments; by default the run's own.
    """
    prefix = f"environments/{environment}/" if environment else ""
    points: dict[int, HeldOutPoint] = {}
    for line in steps:
        evaluated_step = line.get(f"{prefix}eval/step")
        if evaluated_step is None:
            continue
        own_metrics = {
            key.removeprefix(prefix): value
            for key, value in line.items()
            if key.startswith(f"{prefix}eval/")
        }
        point = to_point(own_metrics, int(evaluated_step))
        if point is not None:
            points[point.step] = point
    return [points[step] for step in sorted(points)]


def build_whole_curve(
    steps: Sequence[Step], evaluation: Mapping[str, Mapping[str, float]], *, is_from_base: bool
) -> list[HeldOutPoint]:
    """Return the curve of a run including its evaluations before and after training.

    Args:
        steps: Lines of `metrics.jsonl` in order.
        evaluation: The metrics `before` and `after` training in the run's record.
        is_from_base: Whether training began with the base model, so that `before` is the result of
            step 0.
    """
    points = {point.step: point for point in build_held_out_curve(steps)}
    if is_from_base:
        before = to_point(evaluation.get("before", {}), 0)
    else:
        before = None
    if before is not None:
        points.setdefault(0, before)
    if steps:
        after = to_point(evaluation.get("after", {}), steps[-1]["step"])
    else:
        after = None
    if after is not None:
        points[after.step] = after
    return [points[step] for step in sorted(points)]


def describe_point(point: HeldOutPoint | None) -> str:
    """Describe a held-out result, as in `0.750 (20 items, 95 % interval 0.531 to 0.888)`."""
    if point is None:
        return "none"
    return describe_accuracy(point.percent_correct, point.items, point.low, point.high)


def describe_accuracy(
    accuracy: float, items: float | None, low: float | None, high: float | None
) -> str:
    """Describe a share with its number of items and its interval."""
    if items is None or low is None or high is None:
        return f"{accuracy:.3f}"
    return f"{accuracy:.3f} ({items:.0f} items, 95 % interval {low:.3f} to {high:.3f})"


def describe_share(share: float, low: float | None, high: float | None) -> str:
    """Describe a share with its 95 % interval in a few characters, as in `0.94 (0.88–0.97)`."""
    if low is None or high is None:
        return f"{share:.2f}"
    return f"{share:.2f} ({low:.2f}–{high:.2f})"


def is_evaluation_key(key: str) -> bool:
    """Return whether a key of the metrics belongs to a held-out evaluation."""
    return key.startswith("eval/") or (key.startswith("environments/") and "/eval/" in key)
