"""Compute each fact about a run once; every surface lays the facts out and computes nothing.

`RunView` is made from the record, the folder and the metrics of a run. Each part is computed when
it is first asked for, so that a surface pays for what it shows.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import ValidationError

from lachesis.base.errors import LachesisError
from lachesis.base.files import read_last_lines
from lachesis.base.formatting import format_duration
from lachesis.base.json_text import Json, ResponseModel
from lachesis.base.timestamps import iso_to_unix_s, seconds_between
from lachesis.checkpoints.export_weights import WeightLocations, find_weights
from lachesis.checkpoints.manifests import Checkpoints, Manifest, find_best
from lachesis.config.prices import TokenCounts
from lachesis.config.run_config import RunConfig
from lachesis.inference_tests.forecast import (
    ActualUsage,
    Forecast,
    compare_with_forecast,
    describe_forecast,
    list_forecast_ranges,
)
from lachesis.reporting.held_out_difference import read_item_shares
from lachesis.reporting.next_steps import NEXT_STEP_COMMANDS, list_next_steps
from lachesis.reporting.run_headline import RunVerdict, describe_verdict
from lachesis.reporting.run_summary import (
    RunSummary,
    compute_mean_reward,
    make_summary,
    select_attempt_steps,
)
from lachesis.runs.environment_counters import read_all_counts
from lachesis.runs.folder import RunDir, shorten_service_name
from lachesis.runs.held_out_results import HeldOutPoint, build_held_out_curve, summarize_failures
from lachesis.runs.metrics import Step
from lachesis.runs.record import PastAttempt, RunRecord, describe_attempt, get_attempt_duration_s
from lachesis.runs.store import read_effective_config
from lachesis.spending.budgets import (
    TOKEN_KINDS,
    Budget,
    BudgetUsage,
    compute_budget_usage,
    list_budgets,
    read_spent_file,
)

__all__ = ["Forecast", "RunView", "describe_forecast", "list_forecast_ranges"]
# A step that is later than the others by this factor, and by this many seconds, has no known end.
MAX_LATENESS, MIN_LATE_S = 5, 30.0
# Number of last steps whose pace gives the estimated time until the end.
PACE_STEPS = 20
# A pause that was noted longer ago is over.
MAX_PAUSE_AGE_S = 30.0


@dataclass(frozen=True)
class CheckpointView:
    """Hold one checkpoint that is kept."""

    step: int
    is_final: bool
    is_best: bool
    """Whether its held-out result, or else its reward, is the best of all checkpoints."""
    reward: float | None
    """Mean reward of the steps since the checkpoint before it."""
    held_out: HeldOutPoint | None


class LastError(ResponseModel):
    """The error that ended a run."""

    message: str
    service: str | None
    """The process that exited first, if one did."""
    log: str | None
    """Its log file."""
    log_tail: str
    """The last lines of that log."""


class RunView:
    """Compute the facts about one run that surfaces lay out.

    Args:
        record: The run, as it was last judged.
        run_dir: Its folder.
        steps: The metrics of all of its steps.
    """

    def __init__(self, record: RunRecord, run_dir: RunDir, steps: Sequence[Step]) -> None:
        self.record, self.run_dir = record, run_dir
        self.steps = select_attempt_steps(record, run_dir, list(steps))

    # --- what was read

    @cached_property
    def manifests(self) -> list[Manifest]:
        """Return the checkpoints that the run can be resumed from, in order."""
        return Checkpoints(self.run_dir.checkpoints).list_intact()

    @cached_property
    def config(self) -> RunConfig | None:
        """Return the configuration of this attempt, or None if it cannot be read."""
        try:
            return read_effective_config(self.run_dir)
        except (LachesisError, OSError):
            return None

    @cached_property
    def counts(self) -> Json:
        """Return the counts of the environments in this attempt: rollouts, failures and reasons."""
        since = self.record.attempt_start_unix_s
        return read_all_counts(self.run_dir.counters_files, since=since) or {}

    # --- how far it is, and how well it does

    @property
    def last_step(self) -> Step:
        """Return the metrics of the last step; empty before the first."""
        return self.steps[-1] if self.steps else {}

    @cached_property
    def summary(self) -> RunSummary:
        """Return the numbers of the run for lists: its steps, mean rewards, usage and settings."""
        return make_summary(
            self.record, self.run_dir, self.steps, self.steps, self.steps, self.config
        )

    @cached_property
    def curve(self) -> list[HeldOutPoint]:
        """Return the held-out results of the run's own environment by step."""
        return build_held_out_curve(self.steps)

    @cached_property
    def verdict(self) -> RunVerdict:
        """Return how the run went: its mark, its first sentence, and what shows it."""
        reward, step = self.summary.reward, self.summary.step
        shares = read_item_shares(self.run_dir)
        return describe_verdict(self.record, step, reward, self.curve, shares)

    @cached_property
    def checkpoints(self) -> list[CheckpointView]:
        """Return the checkpoints that are kept, in order."""
        points = {point.step: point for point in self.curve}
        best = find_best(self.manifests)
        views, previous = [], 0
        for manifest in self.manifests:
            steps = [step for step in self.steps if previous < step["step"] <= manifest.step]
            views.append(
                CheckpointView(
                    step=manifest.step,
                    is_final=self.record.has_ended and manifest.step == self.record.total_steps,
                    is_best=manifest is best,
                    reward=compute_mean_reward(steps),
                    held_out=points.get(manifest.step),
                )
            )
            previous = manifest.step
        return views

    @cached_property
    def weights(self) -> WeightLocations:
        """Return where the newest weights are, and better ones if there are any."""
        return find_weights(self.run_dir)

    @cached_property
    def rollout_reasons(self) -> Json | None:
        """Return how many rollouts were scored and invalid, and the reasons of invalid ones and of
        rewards of 0; None without a reason.
        """
        reasons = {
            "invalid_reasons": self.counts.get("errors") or {},
            "zero_reasons": self.counts.get("zero_reasons") or {},
        }
        if not any(reasons.values()):
            return None
        return {
            "scored": int(self.counts.get("rollouts", 0)),
            "invalid": int(self.counts.get("invalid_rollouts", 0)),
            **reasons,
        }

    @cached_property
    def evaluation_faults(self) -> Json | None:
        """Return the faults of the evaluations; see `summarize_failures`."""
        return summarize_failures(self.run_dir, self.counts)

    # --- what it has used, and what it will use

    @cached_property
    def spent(self) -> dict[str, float]:
        """Return the usage that was written at the end of the last attempt."""
        return read_spent_file(self.run_dir.spent)

    @cached_property
    def usage(self) -> BudgetUsage:
        """Return the hours, tokens and US dollars of all attempts."""
        return compute_budget_usage(self.record, self.last_step, saved=self.spent)

    @cached_property
    def tokens(self) -> TokenCounts:
        """Return the tokens of all attempts by kind; the final evaluation is included."""
        return TokenCounts(
            **{
                kind: max(self.last_step.get(f"tokens/{kind}_total") or 0, self.spent.get(kind, 0))
                for kind in TOKEN_KINDS
            }
        )

    @property
    def budgets(self) -> list[Budget]:
        """Return each budget of the run with its used part."""
        if self.config is None:
            return []
        return list_budgets(self.config.limits, self.usage)

    @cached_property
    def forecast(self) -> Forecast | None:
        """Return the forecast that the run was started with; None without a readable forecast."""
        if not self.record.forecast:
            return None
        try:
            return Forecast.model_validate(self.record.forecast)
        except ValidationError:
            return None

    @cached_property
    def actual(self) -> ActualUsage | None:
        """Return the usage of the run beside its forecast; None before the first step."""
        if not self.steps:
            return None
        training_hours = sum(step.get("time/step") or 0.0 for step in self.steps) / 3600
        actual = ActualUsage(
            tokens=self.tokens,
            hours=self.usage.hours,
            training_hours=round(training_hours, 4),
            cost_usd=self.usage.cost_usd,
        )
        if self.forecast is not None:
            actual.ratio = compare_with_forecast(
                self.forecast,
                steps=self.last_step["step"],
                tokens=self.tokens,
                training_hours=training_hours,
                cost_usd=self.usage.cost_usd,
            )
        return actual

    @property
    def late_s(self) -> float | None:
        """Return the seconds since the newest step where the next one takes far longer than the
        others; None where it does not, or nothing is known.
        """
        pace, steps = self._pace, self.steps
        if pace is None or self.record.has_ended:
            return None
        age_s = time.time() - float(steps[-1]["time"])
        return age_s if age_s > max(MIN_LATE_S, MAX_LATENESS * pace) else None

    @property
    def _pace(self) -> float | None:
        """Return the seconds per step of the newest steps of this attempt, if they are known."""
        attempt_start = iso_to_unix_s(self.record.started_at or self.record.created_at)
        # Without the steps before a resume.
        steps = [
            step for step in self.steps[-PACE_STEPS:] if (step.get("time") or 0.0) >= attempt_start
        ]
        if len(steps) < 2:
            return None
        first, last = steps[0], steps[-1]
        return float(last["time"] - first["time"]) / int(max(1, last["step"] - first["step"]))

    @property
    def eta_s(self) -> float | None:
        """Return the seconds until the last step by the pace of the newest ones, if known."""
        record, pace = self.record, self._pace
        if record.status != "running" or record.stall is not None or pace is None:
            return None
        steps_left = record.total_steps - self.last_step["step"]
        # The monitor has not looked yet, but this step already takes far longer than the others.
        if steps_left <= 0 or self.late_s is not None:
            return None
        return round(float(steps_left * pace), 1)

    @property
    def running_minutes(self) -> float:
        """Return the minutes since this attempt began, or since the run was created."""
        if self.record.started_at:
            seconds = get_attempt_duration_s(self.record)
        else:
            seconds = seconds_between(self.record.created_at, self.record.ended_at)
        return round(seconds / 60, 2)

    # --- what it waits for, why it ended, and what can be done

    @property
    def pause(self) -> str | None:
        """Return why the Tinker server makes the run wait, and since when, or None."""
        if self.record.has_ended:
            return None
        try:
            pause = json.loads(self.run_dir.server_pause.read_text())
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

    @property
    def last_error(self) -> LastError | None:
        """Return the error that ended the run, with the end of the log of the failed service."""
        if self.record.error is None:
            return None
        message = (self.record.error.splitlines() or ["no reason was given"])[0]
        service = self.record.failed_service
        if not service:
            return LastError(message=message, service=None, log=None, log_tail="")
        log = self.run_dir.get_log_file(service)
        return LastError(
            message=message,
            service=shorten_service_name(service),
            log=str(log),
            log_tail=read_last_lines(log),
        )

    @property
    def attempts(self) -> list[PastAttempt]:
        """Return all attempts of the run, the present one last."""
        return [*self.record.past_attempts, describe_attempt(self.record)]

    @cached_property
    def wandb_folder(self) -> str | None:
        """Return W&B's newest offline run, for `wandb sync`, or None."""
        folders = sorted((self.run_dir.path / "wandb").glob("offline-run-*"))
        return next((str(folder) for folder in reversed(folders)), None)

    def list_next_steps(self, templates: Mapping[str, str] = NEXT_STEP_COMMANDS) -> list[str]:
        """Return the possible next steps, as the commands or calls of a user interface."""
        return list_next_steps(self.record, self.run_dir, templates)


def find_log_files(record: RunRecord, run_dir: RunDir) -> dict[str, str]:
    """Return the log file per process; the three processes of every run are always present."""
    engine = ("engine",) if record.profile == "embedded" else ()
    names = dict.fromkeys(("api", "trainer", "environment", *engine, *record.services))
    return {shorten_service_name(name): str(run_dir.get_log_file(name)) for name in names}
