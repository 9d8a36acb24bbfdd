"""Summarize runs for lists and comparisons: progress, rewards, held-out results, and settings.

A summary reads the first and the last lines of a run's metrics, so that a list of many long runs
is made quickly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.base.errors import LachesisError
from lachesis.base.json_text import Json
from lachesis.config.run_config import RunConfig
from lachesis.config.run_fields import INFRASTRUCTURE, Section
from lachesis.reporting.status import REWARD_STEPS, compute_mean_reward, count_reward_steps
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import (
    HeldOutPoint,
    build_held_out_curve,
    find_newest_result,
    to_point,
)
from lachesis.runs.metrics import MetricsFile, Step
from lachesis.runs.record import RunRecord, get_attempt_duration_s
from lachesis.spending.budgets import TOKEN_KINDS

# Last steps of a run that are searched for a held-out result.
MAX_HELD_OUT_STEPS = 60
# Fields that differ between any two runs, or that a column of their own shows.
EXCLUDED_SETTINGS = frozenset(
    {"env.wandb_name", "env.mixture", "env.total_steps", "tinker.wandb_project"}
)
# Fields of the record that a list shows as they are.
SHOWN_FIELDS = {
    "run_id", "name", "note", "tags", "environment", "status", "wandb_run_name", "profile",
    "created_at", "total_steps", "seed", "schedule",
}  # fmt: skip
# The sections whose fields a comparison shows.
SECTIONS = ("env", "tinker", "limits")


@dataclass(frozen=True)
class RunSummary:
    """Hold what a list or a comparison shows of one run."""

    record: RunRecord
    step: int
    reward: dict[str, float | None]
    """The first and the last mean reward, each over `reward_steps` steps."""
    reward_steps: int
    held_out: HeldOutPoint | None
    """The newest held-out result."""
    held_out_before: HeldOutPoint | None
    """The held-out result of the model before training."""
    duration_s: float | None
    """Seconds of all attempts together; None before the first."""
    tokens: int | None
    """Tokens so far, prefill, sampled and trained together; None before the first step."""
    cost_usd: float | None
    """US dollars so far by the price table; None where nothing is paid, or prices are unknown."""
    settings: dict[str, Any]
    """The fields of its configuration by SECTION.FIELD, and `model`."""

    def to_payload(self) -> Json:
        """Return the summary as JSON, without the settings."""
        record = self.record
        return {
            **record.model_dump(include=SHOWN_FIELDS),
            "model": record.base_model,
            "learning": record.learning,
            "evidence": record.evidence,
            "stalled": record.stall_text,
            "step": self.step,
            "reward": self.reward,
            "reward_steps": self.reward_steps,
            "held_out": self.held_out.model_dump() if self.held_out else None,
            "duration_s": self.duration_s,
        }


def summarize_run(record: RunRecord, run_dir: RunDir) -> RunSummary:
    """Return the summary of a run.

    Metrics or a configuration that cannot be read count as none, so that other runs are still
    listed; the status of the run reports the problem.
    """
    metrics = MetricsFile(run_dir.metrics)
    # A resumed run has made some steps twice; near its ends that does not matter for a summary.
    first_steps: list[Step] = []
    last_steps: list[Step] = []
    with contextlib.suppress(OSError):
        first_steps, last_steps = metrics.head(REWARD_STEPS), metrics.tail(MAX_HELD_OUT_STEPS)
    last_step = last_steps[-1] if last_steps else {}
    step = last_step.get("step", 0)
    count = count_reward_steps(step)
    reward = {}
    if last_steps:
        reward = {
            "first": compute_mean_reward(first_steps[:count]),
            "last": compute_mean_reward(last_steps[-count:]),
        }
    return RunSummary(
        record=record,
        step=step,
        reward=reward,
        reward_steps=count,
        held_out=find_newest_result(record, last_steps),
        held_out_before=_find_result_before(record, first_steps),
        duration_s=_compute_duration_s(record),
        tokens=_count_tokens(last_step),
        cost_usd=last_step.get("cost/total"),
        settings=_read_settings(record, run_dir),
    )


def _find_result_before(record: RunRecord, first_steps: Sequence[Step]) -> HeldOutPoint | None:
    """Return the held-out result at step 0 if it is known."""
    curve = build_held_out_curve(first_steps)
    if curve and curve[0].step == 0:
        return curve[0]
    return to_point(record.evaluation.get("before", {}), 0)


def _count_tokens(last_step: Step) -> int | None:
    counts = [last_step.get(f"tokens/{kind}_total") for kind in TOKEN_KINDS]
    known_counts = [count for count in counts if count is not None]
    if known_counts:
        return int(sum(known_counts))
    return None


def _compute_duration_s(record: RunRecord) -> float | None:
    """Return the seconds of all attempts, the present one included."""
    if record.started_at is None and not record.earlier_hours:
        return None
    attempt_s = 0.0
    if record.attempt_duration_s is not None or record.started_at is not None:
        attempt_s = get_attempt_duration_s(record)
    return round(record.earlier_hours * 3600 + attempt_s, 1)


def _read_settings(record: RunRecord, run_dir: RunDir) -> dict[str, Any]:
    try:
        config = RunConfig.from_yaml(run_dir.config)
    except (OSError, LachesisError):
        return {}
    settings: dict[str, Any] = {"model": get_model_name(record), "profile": record.profile}
    for name in SECTIONS:
        section: Section = getattr(config, name)
        for field, value in section.model_dump().items():
            key = f"{name}.{field}"
            if key not in EXCLUDED_SETTINGS and not _is_infrastructure(section, field):
                settings[key] = value
    if config.env.mixture:
        settings["env.mixture"] = config.env.model_dump()["mixture"]
    return settings


def get_model_name(record: RunRecord) -> str:
    """Return the name of the base model; of a folder, its last part."""
    if Path(record.base_model).is_absolute():
        return Path(record.base_model).name
    return record.base_model


def _is_infrastructure(section: Section, field: str) -> bool:
    info = type(section).model_fields.get(field)
    return info is not None and INFRASTRUCTURE in info.metadata


def find_differing_settings(summaries: Sequence[RunSummary]) -> dict[str, str]:
    """Return the settings in which runs differ, by the name that a table shows.

    A setting that only some of the runs have, because they are on different environments, counts if
    those that have it differ.

    Returns:
        SECTION.FIELD by the field's name, or by SECTION.FIELD where two fields have one name.
    """
    differing = []
    for key in dict.fromkeys(key for summary in summaries for key in summary.settings):
        values = [summary.settings[key] for summary in summaries if key in summary.settings]
        if any(value != values[0] for value in values):
            differing.append(key)
    short_names = [key.rpartition(".")[2] for key in differing]
    return {
        short_name if short_names.count(short_name) == 1 else key: key
        for key, short_name in zip(differing, short_names, strict=True)
    }
