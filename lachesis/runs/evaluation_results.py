"""Collect the results of a run's evaluations on held-out items."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.base.files import storage_errors
from lachesis.base.json_lines import read_json_lines
from lachesis.base.json_text import Json
from lachesis.base.paths import to_safe_name
from lachesis.base.secrets import redact
from lachesis.base.timestamps import now_iso
from lachesis.runs.held_out import HeldOutPoint, build_whole_curve, compute_interval, to_point
from lachesis.runs.run_dir import RunDir
from lachesis.runs.run_record import RunRecord

Step = Mapping[str, Any]
MAX_REASON_CHARS = 1000
# Evaluations that have blocked the environment's event loop for less are not worth a word.
MIN_BLOCKED_S = 5.0


def build_run_curve(
    record: RunRecord, run_dir: RunDir, steps: Sequence[Step]
) -> list[HeldOutPoint]:
    """Return the held-out results of a run's own environment in order of the evaluated steps.

    The evaluation after training is the last point. The one before training is the first point if
    training began with the base model.
    """
    # Release 0.1.0 called the file `supervised.json`.
    has_sft = any((run_dir.path / name).exists() for name in ("sft.json", "supervised.json"))
    return build_whole_curve(
        steps, record.evaluation, is_from_base=record.forked_from is None and not has_sft
    )


def read_accuracies(record: RunRecord) -> dict[str, float | None]:
    """Return the accuracy before and after training of each of the run's environments."""
    return {name: _get_accuracy(metrics) for name, metrics in _split_evaluations(record).items()}


def read_accuracy_intervals(record: RunRecord) -> dict[str, Json]:
    """Return `items`, `low` and `high` of each accuracy whose number of items is known."""
    intervals = {}
    for name, metrics in _split_evaluations(record).items():
        accuracy = _get_accuracy(metrics)
        if accuracy is not None and (
            interval := compute_interval(accuracy, metrics.get("eval/items"))
        ):
            intervals[name] = interval
    return intervals


def record_failed_evaluation(file: Path, step: int, environment: str, reason: str) -> None:
    """Append a failed evaluation, before, during or after training, to the run's file of them.

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
    """Return what is wrong with the evaluations of a run, or None.

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
    """Return what `summarize_failures` has found as one sentence."""
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
    if curve and curve[-1].step > 0:
        return curve[-1].percent_correct
    return None


def find_newest_result(record: RunRecord, steps: Sequence[Step]) -> HeldOutPoint | None:
    """Return the newest held-out result of a run, given its last steps."""
    curve = build_whole_curve(steps, record.evaluation, is_from_base=False)
    if curve:
        return curve[-1]
    return None


def _split_evaluations(record: RunRecord) -> dict[str, dict[str, float]]:
    """Return the metrics of each environment's evaluations before and after training, by name."""
    evaluations = dict(record.evaluation)
    for name in record.additional_environments:
        prefix = f"{to_safe_name(name)}/"
        for moment, metrics in record.evaluation.items():
            own_metrics = {
                key.removeprefix(prefix): value
                for key, value in metrics.items()
                if key.startswith(prefix)
            }
            evaluations[f"{name} {moment}"] = own_metrics
    return evaluations


def _get_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Return the share of correct answers, or the first metric of an environment that names
    none.
    """
    point = to_point(metrics, 0)
    if point is not None:
        return point.percent_correct
    return next(iter(metrics.values()), None)
