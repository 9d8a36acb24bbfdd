"""Judge a run from its files and write the judgement into its record.

The monitor does this at every tick. A run that has ended is judged once more by whichever notices
its end first: its flow, the monitor, or a command that shows the run while neither a monitor nor a
server is running.
"""

import functools
import logging
import re
from pathlib import Path
from typing import Any

from lachesis.base import paths
from lachesis.base.errors import LachesisError
from lachesis.base.timestamps import now_iso, seconds_between
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.field_edits import ConfigFields
from lachesis.config.run_config import RunConfig
from lachesis.launch.choose_model import (
    TINY_MODEL,
    get_default_tiny_model_path,
    is_taught_on,
    suits_tiny_model,
)
from lachesis.monitor.learning_rules import judge_learning
from lachesis.monitor.observe import Observation, observe_files
from lachesis.monitor.run_history import RunFacts, RunHealth, Step
from lachesis.monitor.stalls import Stall
from lachesis.monitor.tick_memory import MonitorMemory, load_memory, save_memory, update_trend
from lachesis.runs.ending import is_elsewhere
from lachesis.runs.held_out_results import find_newest_result
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.runs.suggested_commands import find_environment, list_further_environments
from lachesis.spending.budgets import compute_budget_shares

log = logging.getLogger(__name__)
# The configuration fields that an advice may set.
ADVISABLE_FIELDS = (
    "learning_rate",
    "max_batches_offpolicy",
    "loss_fn",
    "max_token_length",
    "group_size",
)
# The methods of an environment from which a tiny model can be taught.
EXAMPLE_METHOD = re.compile(r"def (?:gold|example)\(")
# Seconds after which the judgement of a living run is refreshed when the run is shown. The monitor
# refreshes it every minute.
MAX_HEALTH_AGE_S = 180.0


def judge_observation(observation: Observation, memory: MonitorMemory) -> RunHealth:
    """Judge a run by an observation, and update the running sums in its memory."""
    memory.trend = update_trend(memory.trend, observation.run_dir, observation.record)
    return judge_learning(
        select_judged_steps(observation),
        first_steps=observation.first_steps,
        trend=memory.trend,
        facts=collect_facts(observation),
    )


def read_final_judgement(record: RunRecord) -> RunHealth | None:
    """Return the judgement of a run that has ended, which is made once, or None before it."""
    health = record.health or {}
    if not record.has_final_judgement:
        return None
    return RunHealth.model_validate({name: health[name] for name in RunHealth.model_fields})


def select_judged_steps(observation: Observation) -> list[Step]:
    """Return the steps that a judgement considers.

    A resumed run is judged by the steps of its current attempt, because the cause of earlier
    trouble may have been fixed. A run that has ended is judged by all of its steps.
    """
    if observation.record.has_ended or observation.record.attempt == 1:
        return observation.last_steps
    return [
        step
        for step in observation.last_steps
        if (step.get("time") or 0.0) >= observation.record.attempt_start_unix_s
    ]


def judge_ended_run(store: RunStore, record: RunRecord) -> RunRecord:
    """Judge a run that has ended, unless that was done before, and return the updated record.

    An error while judging or writing is logged and the record is returned unchanged.
    """
    if not record.has_ended or record.has_final_judgement:
        return record
    try:
        should_save = not is_elsewhere(record)
        health = _judge_files(store, record, should_save=should_save)
        if not should_save:
            return record.model_copy(update={"health": health})
        return store.update(record.run_id, if_attempt=record.attempt, health=health)
    except Exception as error:  # neither a full disk nor a damaged file may hide the run
        log.warning("run %s was not judged at its end: %s", record.run_id, error)
        return record


def refresh_health(store: RunStore, record: RunRecord) -> RunRecord:
    """Return the record with an up-to-date judgement.

    The judgement of a living run is not written to disk, because the monitor writes it.
    """
    if record.has_ended:
        return judge_ended_run(store, record)
    judged_at = (record.health or {}).get("at")
    if judged_at is not None and seconds_between(judged_at) < MAX_HEALTH_AGE_S:
        return record
    try:
        return record.model_copy(update={"health": _judge_files(store, record, should_save=False)})
    except Exception as error:
        log.warning("run %s was not judged: %s", record.run_id, error)
        return record


def _judge_files(store: RunStore, record: RunRecord, *, should_save: bool) -> dict[str, Any]:
    """Judge a run from its files alone, and return the judgement as the record keeps it."""
    observation = observe_files(store, record)
    memory = load_memory(observation.run_dir, record)
    health = judge_observation(observation, memory)
    if should_save:
        save_memory(observation.run_dir, memory)
    entry = build_health_entry(observation, health)
    # Files alone do not show a stall; the one that the monitor saw lasts until the next step.
    if record.stall and entry["step"] == (record.health or {}).get("step"):
        entry["stalled"] = record.stall
    return entry


def build_health_entry(
    observation: Observation, health: RunHealth, stall: Stall | None = None
) -> dict[str, Any]:
    """Return the part of a judgement that the record keeps.

    The key `final` marks the judgement of a run that has ended.
    """
    if observation.last_steps:
        last_step = observation.last_steps[-1]
    else:
        last_step = {}
    held_out = find_newest_result(observation.last_steps)
    return {
        **health.model_dump(),
        "step": last_step.get("step"),
        "reward": last_step.get("reward/mean"),
        "held_out": held_out.percent_correct if held_out else None,
        "stalled": stall.model_dump() if stall else None,
        "budget": compute_budget_shares(observation.limits, observation.budget_usage),
        "spent": observation.budget_usage.model_dump(),
        "at": now_iso(),
        "final": observation.record.has_ended,
    }


def collect_facts(observation: Observation) -> RunFacts:
    """Return the facts about a run that advice needs, apart from its steps."""
    record, config = observation.record, observation.config
    checkpoints_folder = observation.run_dir.checkpoints
    home = observation.run_dir.path.parent.parent
    facts: dict[str, Any] = {
        "run_id": record.run_id,
        "environment": find_environment(record),
        "additional_environments": list_further_environments(record),
        "profile": record.profile,
        "total_steps": record.total_steps,
        "batch_size": record.batch_size,
        "has_ended": record.has_ended,
        "status": record.status,
        "error": record.error,
        "checkpoints": tuple(
            manifest.step for manifest in Checkpoints(checkpoints_folder).list_intact()
        ),
        "tunable_fields": _find_tunable_fields(record.profile),
        "model": _format_model(record, home),
        "can_be_taught": _can_be_taught(record, home),
        "set_fields": record.set_fields,
        "environment_counts": observation.environment_counts or {},
    }
    if config is not None:
        facts |= _collect_config_facts(record, config)
    return RunFacts(**facts)


def _collect_config_facts(record: RunRecord, config: RunConfig) -> dict[str, Any]:
    """Return the settings that a judgement needs."""
    return {
        "batch_size": config.env.batch_size,
        "group_size": config.env.group_size,
        "learning_rate": config.tinker.learning_rate,
        "max_token_length": config.env.max_token_length,
        "effective_values": {
            "max_batches_offpolicy": str(config.env.max_batches_offpolicy),
            "loss_fn": config.effective_loss,
        },
    }


def _format_model(record: RunRecord, home: Path) -> str:
    """Return the base model as `--model` takes it."""
    if Path(record.base_model) == get_default_tiny_model_path(home):
        return TINY_MODEL
    return record.base_model


def _can_be_taught(record: RunRecord, home: Path) -> bool:
    """Return whether `lachesis model build` makes a better tiny model than this run has."""
    environments = [record.environment, *record.additional_environments]
    files = [Path(file) for file in record.environment_files.values()]
    if suits_tiny_model(environments) or not all(map(_offers_examples, files)):
        return False
    model = Path(record.base_model)
    return model.parent == paths.models_dir(home) and not is_taught_on(model, environments)


def _offers_examples(file: Path) -> bool:
    """Return whether an environment has the methods that examples are made with."""
    try:
        return EXAMPLE_METHOD.search(file.read_text(errors="replace")) is not None
    except OSError:
        return False


@functools.cache
def _find_tunable_fields(profile: str) -> frozenset[str]:
    try:
        fields = ConfigFields(profile)
        return frozenset(name for name in ADVISABLE_FIELDS if fields.find(name).lock_reason is None)
    except (LachesisError, KeyError):
        return frozenset()
