"""Read the results of a run on held-out items: its curve, its intervals, and failed evaluations."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from lachesis.base.confidence_intervals import wilson_interval
from lachesis.base.files import storage_errors
from lachesis.base.formatting import format_reward
from lachesis.base.json_text import Json, read_json_lines
from lachesis.base.reward_values import is_score
from lachesis.base.secrets import redact
from lachesis.base.timestamps import now_iso
from lachesis.runs.folder import RunDir
from lachesis.runs.record import RunRecord

Step = Mapping[str, Any]
# Prefixes of the metrics of the weights of a step, and of the base model.
OWN_PREFIX, BASE_PREFIX = "eval/", "eval_base/"
MAX_METRICS, MAX_NAME_LENGTH = 64, 80
# Names under these prefixes that only the trainer writes.
RESERVED_NAMES = ("step", "failed", "items", "low", "high", "seconds")
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
    # As many digits as nobody shows: a number that is rounded twice may be wrong by one.
    return {"items": num_items, "low": round(low, 6), "high": round(high, 6)}


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


def parse_reported_metrics(raw_metrics: object) -> dict[str, float]:
    """Return the finite numbers of the metrics that an environment reports, under `eval/NAME`."""
    metrics: dict[str, float] = {}
    for key, value in raw_metrics.items() if isinstance(raw_metrics, Mapping) else ():
        name = str(key).removeprefix(OWN_PREFIX)[:MAX_NAME_LENGTH]
        if (
            is_score(value)
            and name
            and len(metrics) < MAX_METRICS
            and (name == "items" or name not in RESERVED_NAMES)
        ):
            metrics[f"{OWN_PREFIX}{name}"] = float(value)
    return metrics


def describe_point(point: HeldOutPoint | None) -> str:
    """Describe a held-out result, as in `0.750 (20 items, 95 % interval 0.531 to 0.888)`."""
    if point is None:
        return "none"
    share = format_reward(point.percent_correct)
    if point.items is None or point.low is None or point.high is None:
        return share
    return f"{share} ({point.items:,} items, 95 % interval {point.low:.3f} to {point.high:.3f})"


def describe_newest(curve: Sequence[HeldOutPoint]) -> str | None:
    """Describe the newest held-out result with its step, or return None without results."""
    if not curve:
        return None
    return f"held out {describe_point(curve[-1])} at step {curve[-1].step}"


def describe_interval(point: HeldOutPoint) -> str:
    """Describe the 95 % interval of a share with its number of items: `0.81 to 1.00, n 20`."""
    if point.low is None or point.high is None:
        return "items not counted"
    return f"{point.low:.2f} to {point.high:.2f}, n {point.items:,}"


def describe_share(point: HeldOutPoint) -> str:
    """Describe a share with its 95 % interval in a few characters, as in `0.94 (0.88–0.97)`."""
    share = f"{point.percent_correct:.2f}"
    if point.low is None or point.high is None:
        return share
    return f"{share} ({point.low:.2f}–{point.high:.2f})"


def is_evaluation_key(key: str) -> bool:
    """Return whether a key of the metrics belongs to a held-out evaluation."""
    is_of_another = key.startswith("environments/") and (
        f"/{OWN_PREFIX}" in key or f"/{BASE_PREFIX}" in key
    )
    return is_of_another or key.startswith((OWN_PREFIX, BASE_PREFIX))


MAX_REASON_CHARS = 1000
# Evaluations that have blocked the environment's event loop for less are not worth a word.
MIN_BLOCKED_S = 5.0


def find_base_result(record: RunRecord, steps: Sequence[Step]) -> HeldOutPoint | None:
    """Return the held-out result of the base model with a run's own environment, or None."""
    return to_point(_find_base_metrics(record, steps, ""), 0)


def find_held_out_answers(run_dir: RunDir) -> dict[str, tuple[str, Path]]:
    """Return the recorded answers of a run's own environment to held-out items.

    Returns:
        Under `before` those of the base model, or else of step 0; under `after` those of the newest
            weights that were evaluated: whose they are, and the JSONL file.
    """
    files = {
        int(file.parent.name.removeprefix("step-")): file
        for file in run_dir.evaluation.glob("step-*/samples.jsonl")
        if file.parent.name.removeprefix("step-").isdecimal()
    }
    answers = {}
    if (base := run_dir.evaluation / "base" / "samples.jsonl").is_file():
        answers["before"] = ("by the base model", base)
    elif 0 in files:
        answers["before"] = ("before training", files[0])
    if (newest := max(files, default=0)) > 0:
        answers["after"] = (f"after step {newest:,}", files[newest])
    return answers


def read_held_out_points(record: RunRecord, steps: Sequence[Step]) -> dict[str, HeldOutPoint]:
    """Return the result `before` training, of the base model, and `after` it, of the last step of
    a run that has ended; those of a further environment under its name and these words.
    """
    points = {}
    for name, (step, metrics) in _find_first_and_last(record, steps).items():
        accuracy = _get_accuracy(metrics)
        if accuracy is not None:
            interval = compute_interval(accuracy, metrics.get("eval/items"))
            points[name] = HeldOutPoint(step=step, percent_correct=accuracy, **interval)
    return points


def record_failed_evaluation(file: Path, step: int, environment: str, reason: str) -> None:
    """Append a failed evaluation to the run's file of them.

    Raises:
        StorageError: The file cannot be written.
    """
    failure = {
        "step": step,
        "environment": environment,
        "reason": redact(reason)[:MAX_REASON_CHARS],
        "at": now_iso(),
    }
    with storage_errors(file):
        file.parent.mkdir(exist_ok=True)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(failure) + "\n")


def summarize_failures(run_dir: RunDir, counts: Json | None = None) -> Json | None:
    """Return the faults of a run's evaluations; None without a fault.

    Args:
        run_dir: The run.
        counts: What the environments have counted in this attempt.

    Returns:
        How many evaluations have failed, the step and the reason of the last one, and the seconds
        for which evaluations have kept training from going on, if these are many.
    """
    lines = read_json_lines(run_dir.failed_evaluations)
    summary: Json = {}
    if lines:
        last = lines[-1]
        summary = {
            "failed": len(lines),
            "last_step": last.get("step"),
            "last_reason": str(last.get("reason")),
        }
    blocked_s = (counts or {}).get("eval_blocked_s") or 0.0
    if blocked_s >= MIN_BLOCKED_S:
        summary["blocked_seconds"] = round(blocked_s, 1)
    return summary or None


def describe_evaluation_faults(summary: Json) -> str:
    """Return the result of `summarize_failures` as one sentence."""
    parts = []
    if summary.get("failed"):
        where = f"{summary['failed']} failed, the last one at step {summary['last_step']}"
        parts.append(f"{where}: {summary['last_reason']}")
    if summary.get("blocked_seconds"):
        parts.append(
            f"the environment's event loop was blocked for {summary['blocked_seconds']:.0f} s "
            "while it evaluated, which delays training; `await asyncio.to_thread(...)` around "
            "long computations of evaluate() lets training go on"
        )
    return "; ".join(parts)


def find_newest_accuracy(curve: Sequence[HeldOutPoint]) -> float | None:
    """Return the newest held-out accuracy after at least one step, or None."""
    _, after = split_curve(curve)
    return after.percent_correct if after else None


def split_curve(curve: Sequence[HeldOutPoint]) -> tuple[HeldOutPoint | None, HeldOutPoint | None]:
    """Return the results before training and of the newest trained weights, or None."""
    before = next((point for point in curve if point.step == 0), None)
    after = next((point for point in reversed(curve) if point.step > 0), None)
    return before, after


def find_newest_result(steps: Sequence[Step]) -> HeldOutPoint | None:
    """Return the newest held-out result of trained weights, given the last steps of a run."""
    return split_curve(build_held_out_curve(steps))[1]


def _find_first_and_last(
    record: RunRecord, steps: Sequence[Step]
) -> dict[str, tuple[int, dict[str, float]]]:
    """Return the step and the metrics of the evaluations that `read_held_out_points` is about."""
    evaluations = {}
    prefixes = {name: f"environments/{name}/" for name in record.additional_environments}
    for name, prefix in ({"": ""} | prefixes).items():
        metrics_by_moment = {"before": (0, _find_base_metrics(record, steps, prefix))}
        if record.has_ended and steps:
            last_step = steps[-1]["step"]
            metrics = _find_metrics(steps, f"{prefix}{OWN_PREFIX}", last_step)
            metrics_by_moment["after"] = (last_step, metrics)
        for moment, (step, metrics) in metrics_by_moment.items():
            if metrics:
                evaluations[f"{name} {moment}".strip()] = (step, metrics)
    return evaluations


def _find_base_metrics(record: RunRecord, steps: Sequence[Step], prefix: str) -> dict[str, float]:
    """Return the metrics of the base model under `eval/NAME`: its own, or those of step 0."""
    own_or_base = OWN_PREFIX if record.starts_from_base else BASE_PREFIX
    return _find_metrics(steps, f"{prefix}{own_or_base}", 0)


def _find_metrics(steps: Sequence[Step], prefix: str, evaluated_step: int) -> dict[str, float]:
    """Return the metrics of the evaluation of one step, under `eval/NAME`."""
    for line in steps:
        if line.get(f"{prefix}step") == evaluated_step:
            return {
                f"{OWN_PREFIX}{key.removeprefix(prefix)}": value
                for key, value in line.items()
                if key.startswith(prefix) and value is not None
            }
    return {}


def _get_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Return the share of correct answers, or an environment's first other metric."""
    point = to_point(metrics, 0)
    if point is not None:
        return point.percent_correct
    others = ("step", "failed", "items", "seconds")
    values = (metrics[key] for key in metrics if key.removeprefix(OWN_PREFIX) not in others)
    return next(values, None)
