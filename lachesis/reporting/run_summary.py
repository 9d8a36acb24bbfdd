"""Summarize runs for lists and comparisons, and find the settings in which they differ.

Only the first and the last lines of the metrics of a run are parsed for its summary.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.base.errors import LachesisError
from lachesis.base.json_text import Json
from lachesis.base.timestamps import iso_to_unix_s
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.locked_fields import is_infrastructure
from lachesis.config.run_config import RunConfig
from lachesis.config.run_fields import Section
from lachesis.reporting.verdict_marks import choose_mark, explain_mark
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import (
    BASE_PREFIX,
    OWN_PREFIX,
    HeldOutPoint,
    find_base_result,
    find_newest_result,
)
from lachesis.runs.metrics import MetricsFile, Step
from lachesis.runs.record import RunRecord, get_attempt_duration_s
from lachesis.runs.store import read_effective_config
from lachesis.spending.budgets import compute_budget_usage, read_spent_file

# Maximum number of steps that the first and the last reward of a run are averaged over, because one
# step has few prompts.
REWARD_STEPS = 5
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
    """Hold the numbers of one run for lists and comparisons."""

    record: RunRecord
    step: int
    reward: dict[str, float | None]
    """The first and the last mean reward, each over `reward_steps` steps."""
    reward_steps: int
    held_out: HeldOutPoint | None
    """The newest held-out result."""
    held_out_before: HeldOutPoint | None
    """The held-out result of the base model."""
    duration_s: float | None
    """Seconds of all attempts together; None before the first."""
    tokens: int
    """Tokens so far, prefill, sampled and trained together."""
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
            "verdict": choose_mark(record).word,
            "evidence": record.evidence,
            "reason": explain_mark(record),
            "stalled": record.stall_text,
            "step": self.step,
            "reward": self.reward,
            "reward_steps": self.reward_steps,
            "held_out": self.held_out.model_dump() if self.held_out else None,
            "duration_s": self.duration_s,
        }


def summarize_run(record: RunRecord, run_dir: RunDir) -> RunSummary:
    """Return the summary of a run, for which only both ends of its metrics are parsed.

    Metrics or a configuration that cannot be read count as none, so that other runs are still
    listed; the status of the run reports the problem.
    """
    metrics, config = MetricsFile(run_dir.metrics), None
    # A resumed run has made some steps twice; near its ends that does not matter for a summary.
    first_steps: list[Step] = []
    last_steps: list[Step] = []
    evaluated_steps: list[Step] = []
    with contextlib.suppress(OSError):
        first_steps, last_steps = metrics.head(REWARD_STEPS), metrics.tail(MAX_HELD_OUT_STEPS)
        evaluated_steps = _find_evaluated_steps(record, metrics, last_steps)
        if has_stale_steps(record, last_steps):
            first_steps = select_attempt_steps(record, run_dir, metrics.read())
            last_steps = evaluated_steps = first_steps
    with contextlib.suppress(OSError, LachesisError):
        config = read_effective_config(run_dir)
    return make_summary(record, run_dir, first_steps, last_steps, evaluated_steps, config)


def has_stale_steps(record: RunRecord, steps: Sequence[Step]) -> bool:
    """Return whether this attempt has made no step yet, so that the last ones are of another."""
    return (
        record.attempt > 1
        and bool(steps)
        and (steps[-1].get("time") or 0.0) < iso_to_unix_s(record.queued_at)
    )


def select_attempt_steps(record: RunRecord, run_dir: RunDir, steps: list[Step]) -> list[Step]:
    """Return the steps without those after the checkpoint that this attempt resumes from."""
    if not has_stale_steps(record, steps):
        return steps
    manifests = Checkpoints(run_dir.checkpoints).list_intact()
    last_step = max((manifest.step for manifest in manifests), default=0)
    return [step for step in steps if step["step"] <= last_step]


def _find_evaluated_steps(
    record: RunRecord, metrics: MetricsFile, last_steps: list[Step]
) -> list[Step]:
    """Return the steps with the first and the newest held-out result."""
    prefix = OWN_PREFIX if record.starts_from_base else BASE_PREFIX
    first = metrics.find_first(f"{prefix}step")
    if first is None:
        return last_steps
    name = f"{OWN_PREFIX}step"
    if not any(name in step for step in last_steps):
        # Of a resumed run, the last line with a result may be of a step that was made again.
        newest = metrics.find_last(name) if record.attempt == 1 else None
        last_steps = metrics.read() if newest is None else [newest]
    return [first, *last_steps]


def make_summary(
    record: RunRecord,
    run_dir: RunDir,
    first_steps: Sequence[Step],
    last_steps: Sequence[Step],
    evaluated_steps: Sequence[Step],
    config: RunConfig | None,
) -> RunSummary:
    """Return the summary of a run of which this was read.

    Args:
        record: The run.
        run_dir: Its folder.
        first_steps: The metrics of its first steps, at least as many as a mean is taken over.
        last_steps: Those of its last steps, likewise.
        evaluated_steps: Those with the first and the newest held-out result.
        config: Its configuration, if that can be read.
    """
    last_step = last_steps[-1] if last_steps else {}
    step = last_step.get("step", 0)
    count = count_reward_steps(step)
    reward = {}
    if last_steps:
        reward = {
            "first": compute_mean_reward(first_steps[:count]),
            "last": compute_mean_reward(last_steps[-count:]),
        }
    usage = compute_budget_usage(record, last_step, saved=read_spent_file(run_dir.spent))
    return RunSummary(
        record=record,
        step=step,
        reward=reward,
        reward_steps=count,
        held_out=find_newest_result(evaluated_steps),
        held_out_before=find_base_result(record, evaluated_steps),
        duration_s=_compute_duration_s(record),
        tokens=int(usage.tokens),
        cost_usd=usage.cost_usd,
        settings=_list_settings(record, config),
    )


def _compute_duration_s(record: RunRecord) -> float | None:
    """Return the seconds of all attempts, the present one included."""
    if record.started_at is None and not record.earlier_hours:
        return None
    attempt_s = 0.0
    if record.attempt_duration_s is not None or record.started_at is not None:
        attempt_s = get_attempt_duration_s(record)
    return round(record.earlier_hours * 3600 + attempt_s, 1)


def _list_settings(record: RunRecord, config: RunConfig | None) -> dict[str, Any]:
    """Return the settings of a run, by SECTION.FIELD, that it may share with others."""
    if config is None:
        return {}
    settings: dict[str, Any] = {"model": get_model_name(record), "profile": record.profile}
    for name in SECTIONS:
        section: Section = getattr(config, name)
        for field, value in section.model_dump().items():
            key = f"{name}.{field}"
            if key not in EXCLUDED_SETTINGS and not is_infrastructure(key):
                settings[key] = value
    if config.env.mixture:
        settings["env.mixture"] = config.env.model_dump()["mixture"]
    return settings


def get_model_name(record: RunRecord) -> str:
    """Return the name of the base model; of a folder, its last part."""
    if Path(record.base_model).is_absolute():
        return Path(record.base_model).name
    return record.base_model


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


def count_reward_steps(num_steps: int) -> int:
    """Return how many steps the first and the last mean reward of a run are averaged over."""
    return max(1, min(REWARD_STEPS, num_steps // 2))  # No step is in both.


def compute_mean_reward(steps: Sequence[Step]) -> float | None:
    """Return the mean of the steps' mean rewards with four decimals, or None if there is none."""
    rewards = [step["reward/mean"] for step in steps if step.get("reward/mean") is not None]
    if not rewards:
        return None
    return round(float(sum(rewards)) / len(rewards), 4)
