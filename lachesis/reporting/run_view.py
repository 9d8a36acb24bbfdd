"""Compute the status and the results of a run for every surface."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from lachesis.base.files import read_last_lines
from lachesis.base.formatting import format_duration
from lachesis.base.json_text import Json
from lachesis.base.timestamps import iso_to_unix_s, seconds_between
from lachesis.checkpoints.export_weights import find_weights
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.prices import TokenCounts
from lachesis.inference_tests.forecast import ActualUsage, Forecast, compare_with_forecast
from lachesis.reporting.mean_rewards import compute_mean_reward, count_reward_steps
from lachesis.reporting.next_steps import NEXT_STEP_COMMANDS, list_next_steps
from lachesis.reporting.run_schemas import (
    LastError,
    QueuePlace,
    RunProgress,
    RunResults,
    RunStatus,
    StatusMetrics,
)
from lachesis.runs.environment_counters import read_all_counts
from lachesis.runs.folder import RunDir, shorten_service_name
from lachesis.runs.held_out_results import (
    HeldOutPoint,
    build_held_out_curve,
    find_newest_accuracy,
    read_accuracies,
    read_accuracy_intervals,
    summarize_failures,
)
from lachesis.runs.metrics import Step, sample_history, select_key_metrics
from lachesis.runs.record import RunRecord, get_attempt_duration_s
from lachesis.spending.budgets import TOKEN_KINDS, compute_budget_usage, read_spent_file

# A step that is later than the others by this factor, and by this many seconds, has no known end.
MAX_LATENESS, MIN_LATE_S = 5, 30.0
# Number of last steps whose pace gives the estimated time until the end.
PACE_STEPS = 20


def build_run_status(
    record: RunRecord,
    run_dir: RunDir,
    steps: list[Step],
    *,
    ui_url: str | None,
    queue: Mapping[str, int] | None,
    warning: str | None,
    next_step_templates: Mapping[str, str] = NEXT_STEP_COMMANDS,
) -> RunStatus:
    """Return the status of a run, as text for a person and as data for a program."""
    manifests = Checkpoints(run_dir.checkpoints).list_intact()
    checkpoints = [manifest.step for manifest in manifests]
    steps = _select_attempt_steps(record, steps, checkpoints)
    last_step, curve = steps[-1] if steps else {}, build_held_out_curve(steps)
    phase = f"waiting for place {queue['place']} in the queue" if queue else record.phase
    progress = RunProgress(
        step=last_step.get("step", 0),
        total=record.total_steps,
        eta_seconds=estimate_eta_s(record, steps),
    )
    optional_fields = _build_optional_fields(record, run_dir, queue, warning)
    if manifests:
        optional_fields["checkpoints_expire_at"] = manifests[-1].expires_at
    return RunStatus(
        run_id=record.run_id,
        status=record.status,
        phase=phase,
        environment=record.environment,
        profile=record.profile,
        running_time_minutes=_compute_running_minutes(record),
        processes=_list_process_states(record),
        progress=progress,
        wandb_project=record.wandb_project,
        wandb_run_name=record.wandb_run_name,
        checkpoints=checkpoints,
        logs=find_log_files(record, run_dir),
        metrics=_build_status_metrics(record, last_step, curve),
        held_out_curve=curve,
        health=record.health,
        ui_url=ui_url,
        next_steps=list_next_steps(record, run_dir, next_step_templates),
        **{key: value for key, value in optional_fields.items() if value},
    )


def _build_optional_fields(
    record: RunRecord, run_dir: RunDir, queue: Mapping[str, int] | None, warning: str | None
) -> Json:
    """Return the fields that a status has only where they are not empty."""
    return {
        "queue": QueuePlace(**queue) if queue else None,
        **record.model_dump(
            include={"wandb_url", "wandb_error", "resumed", "forked_from", "end_cause", "error"}
        ),
        "dead_environments": record.dead_environments,
        "pause": describe_pause(record, run_dir),
        "last_error": _build_last_error(record, run_dir),
        "rollouts": _summarize_rollouts(record, run_dir),
        "evaluation": summarize_failures(run_dir, _read_counts(record, run_dir)),
        "warning": warning,
    }


def _compute_running_minutes(record: RunRecord) -> float:
    if record.started_at:
        seconds = get_attempt_duration_s(record)
    else:
        seconds = seconds_between(record.created_at, record.ended_at)
    return round(seconds / 60, 2)


def _build_status_metrics(
    record: RunRecord, last_step: Step, curve: list[HeldOutPoint]
) -> StatusMetrics:
    """Return the metrics of the last step under the names that users rely on."""
    return StatusMetrics(
        step=last_step.get("step", 0),
        reward_mean=last_step.get("reward/mean"),
        percent_correct=last_step.get("train/percent_correct"),
        eval_percent_correct=find_newest_accuracy(curve),
        loss=last_step.get("train/loss"),
        state=record.status,
    )


def _select_attempt_steps(
    record: RunRecord, steps: list[Step], checkpoints: list[int]
) -> list[Step]:
    """Return the steps without those after the checkpoint that this attempt was resumed from."""
    has_stale_steps = (
        record.attempt > 1
        and bool(steps)
        and (steps[-1].get("time") or 0.0) < iso_to_unix_s(record.queued_at)
    )
    if has_stale_steps:
        return [step for step in steps if step["step"] <= max(checkpoints, default=0)]
    return steps


def build_run_results(
    record: RunRecord,
    run_dir: RunDir,
    steps: list[Step],
    *,
    next_step_templates: Mapping[str, str] = NEXT_STEP_COMMANDS,
) -> RunResults:
    """Return the results of a run."""
    optional_fields: Json = {
        **_build_forecast_fields(record, run_dir, steps),
        "health": record.health,
        "rollouts": _summarize_rollouts(record, run_dir),
        "evaluation": summarize_failures(run_dir, _read_counts(record, run_dir)),
        "wandb_url": record.wandb_url,
        "wandb_dir": _find_offline_wandb_run(run_dir) if not record.wandb_url else None,
        "end_cause": record.end_cause,
        "error": record.error,
    }
    curve = build_held_out_curve(steps)
    return RunResults(
        run_id=record.run_id,
        status=record.status,
        environment=record.environment,
        base_model=record.base_model,
        wandb_project=record.wandb_project,
        wandb_run_name=record.wandb_run_name,
        reward=_compute_first_and_last_reward(steps),
        held_out=read_accuracies(record, steps),
        held_out_intervals=read_accuracy_intervals(record, steps),
        held_out_curve=curve,
        **summarize_last_steps(steps, curve),
        weights=find_weights(run_dir),
        final_metrics=steps[-1] if steps else {},
        history=[select_key_metrics(step) for step in sample_history(steps)],
        metrics_file=str(run_dir.metrics),
        next_steps=[
            next_step
            for next_step in list_next_steps(record, run_dir, next_step_templates)
            if next_step != next_step_templates.get("results", "").format(run=record.run_id)
        ],
        **{key: value for key, value in optional_fields.items() if value},
    )


def _find_offline_wandb_run(run_dir: RunDir) -> str | None:
    """Return the newest offline run folder of W&B, which `wandb sync` uploads; None if there is
    none.
    """
    folders = sorted((run_dir.path / "wandb").glob("offline-run-*"))
    if folders:
        return str(folders[-1])
    return None


def _build_forecast_fields(record: RunRecord, run_dir: RunDir, steps: list[Step]) -> Json:
    """Return the forecast that the run was started with, and what it has used."""
    # the final evaluation uses tokens after the last step
    last_step, usage_at_end = steps[-1] if steps else {}, read_spent_file(run_dir.spent)
    tokens = TokenCounts(
        **{
            kind: max(last_step.get(f"tokens/{kind}_total") or 0, usage_at_end.get(kind, 0))
            for kind in TOKEN_KINDS
        }
    )
    usage = compute_budget_usage(record, last_step, saved=usage_at_end)
    training_hours = sum(step.get("time/step") or 0.0 for step in steps) / 3600
    actual = ActualUsage(
        tokens=tokens,
        hours=usage.hours,
        training_hours=round(training_hours, 4),
        cost_usd=usage.cost_usd,
    )
    try:
        if record.forecast:
            forecast = Forecast.model_validate(record.forecast)
        else:
            forecast = None
    except ValidationError:
        forecast = None
    if forecast is None or not steps:
        if steps:
            return {"actual": actual.model_dump(mode="json")}
        return {}
    actual.ratio = compare_with_forecast(
        forecast,
        steps=last_step["step"],
        tokens=tokens,
        training_hours=training_hours,
        cost_usd=usage.cost_usd,
    )
    return {"forecast": record.forecast, "actual": actual.model_dump(mode="json")}


def _list_process_states(record: RunRecord) -> dict[str, str]:
    """Return the state per process; the three processes of every run are always present."""
    states = {
        shorten_service_name(name): service.state for name, service in record.services.items()
    }
    return {**dict.fromkeys(("api", "trainer", "env"), "pending"), **states}


def find_log_files(record: RunRecord, run_dir: RunDir) -> dict[str, str]:
    """Return the log file per process; the three processes of every run are always present."""
    engine = ("engine",) if record.profile == "embedded" else ()
    names = dict.fromkeys(("api", "trainer", "environment", *engine, *record.services))
    return {shorten_service_name(name): str(run_dir.get_log_file(name)) for name in names}


def _read_counts(record: RunRecord, run_dir: RunDir) -> Json:
    return read_all_counts(run_dir.counters_files, since=record.attempt_start_unix_s) or {}


def _summarize_rollouts(record: RunRecord, run_dir: RunDir) -> Json | None:
    counts = _read_counts(record, run_dir)
    reasons = {
        "invalid_reasons": counts.get("errors") or {},
        "zero_reasons": counts.get("zero_reasons") or {},
    }
    if not any(reasons.values()):
        return None
    return {
        "scored": int(counts.get("rollouts", 0)),
        "invalid": int(counts.get("invalid_rollouts", 0)),
        **reasons,
    }


def _build_last_error(record: RunRecord, run_dir: RunDir) -> LastError | None:
    if record.error is None:
        return None
    if record.failed_service:
        log = run_dir.get_log_file(record.failed_service)
    else:
        log = None
    return LastError(
        message=(record.error.splitlines() or ["no reason was given"])[0],
        service=shorten_service_name(record.failed_service) if record.failed_service else None,
        log=str(log) if log else None,
        log_tail=read_last_lines(log) if log else "",
    )


def estimate_eta_s(record: RunRecord, steps: list[Step]) -> float | None:
    """Return the seconds until the last step by the pace of the newest ones; None if unknown."""
    attempt_start = iso_to_unix_s(record.started_at or record.created_at)
    # without the steps before a resume
    recent_steps = [
        step for step in steps[-PACE_STEPS:] if (step.get("time") or 0.0) >= attempt_start
    ]
    if (
        record.status != "running"
        or record.stall is not None
        or len(recent_steps) < 2
        or recent_steps[-1]["step"] >= record.total_steps
    ):
        return None
    num_steps = recent_steps[-1]["step"] - recent_steps[0]["step"]
    seconds_per_step = (recent_steps[-1]["time"] - recent_steps[0]["time"]) / max(1, num_steps)
    # The monitor has not looked yet, but this step already takes far longer than the others.
    if time.time() - recent_steps[-1]["time"] > max(MIN_LATE_S, MAX_LATENESS * seconds_per_step):
        return None
    return round(float(max(0, record.total_steps - recent_steps[-1]["step"]) * seconds_per_step), 1)


def _compute_first_and_last_reward(steps: list[Step]) -> dict[str, float | None]:
    if not steps:
        return {}
    count = count_reward_steps(len(steps))
    return {
        "first": compute_mean_reward(steps[:count]),
        "last": compute_mean_reward(steps[-count:]),
    }


# Number of last steps whose rollouts make an accuracy, because one step has few prompts.
NUM_STEPS = 5


def summarize_last_steps(steps: Sequence[Step], curve: Sequence[HeldOutPoint]) -> Json:
    """Return `loss`, `accuracy` and `accuracy_source`; all are known after a step."""
    if not steps:
        return {"loss": None, "accuracy": None, "accuracy_source": None}
    losses = [step["train/loss"] for step in steps if step.get("train/loss") is not None]
    accuracy = find_newest_accuracy(curve)
    source = "held-out items"
    if accuracy is None:
        shares = [step.get("train/percent_correct") for step in steps[-NUM_STEPS:]]
        known_shares = [share for share in shares if share is not None]
        accuracy = round(statistics.fmean(known_shares), 4) if known_shares else None
        source = "rollouts of training"
    # Steps whose groups have equal rewards have no loss.
    return {
        "loss": losses[-1] if losses else 0.0,
        "accuracy": accuracy,
        "accuracy_source": source if accuracy is not None else None,
    }


# A pause that was noted longer ago is over.
MAX_PAUSE_AGE_S = 30.0


def describe_pause(record: RunRecord, run_dir: RunDir) -> str | None:
    """Return why the Tinker server makes a run wait, and since when, or None."""
    if record.has_ended:
        return None
    try:
        pause = json.loads(run_dir.server_pause.read_text())
        last_at, since = float(pause["last_at"]), float(pause["since"])
        reason, refusals = str(pause["reason"]), int(pause["refusals"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if time.time() - last_at > MAX_PAUSE_AGE_S:
        return None
    return (
        f"the Tinker server makes it wait: {reason} (since {format_duration(last_at - since)}, "
        f"{refusals} times); it goes on by itself"
    )
