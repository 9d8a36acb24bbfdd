"""Judge a run from its files, and write the judgement into its record.

The monitor does this at every tick. A run that has ended is judged once more, whoever finds that
out first: its flow, the monitor, or a command that shows the run while no monitor and no server is
there.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from lachesis.base import paths
from lachesis.base.errors import LachesisError
from lachesis.config.edits import ConfigFields
from lachesis.monitor.course import Health, RunFacts, Step
from lachesis.monitor.learning import judge
from lachesis.monitor.observe import Look, look_at_files
from lachesis.monitor.stalls import Stall
from lachesis.monitor.watched import Memory, follow, load_memory, save_memory
from lachesis.runs.budgets import compute_budget_shares
from lachesis.runs.checkpoints import Checkpoints
from lachesis.runs.evaluation_results import find_newest_result
from lachesis.runs.store import RunRecord, RunStore, now_iso, seconds_between

log = logging.getLogger(__name__)
ADVISED = ("learning_rate", "max_batches_offpolicy", "loss_fn", "max_token_length", "group_size")
"""The fields that an advice may set."""
MOST_JUDGED = 50
"""The newest runs of a list, which are judged anew where that is due."""
FRESH_S = 180.0
"""A living run whose judgement is older than this is judged anew when it is shown; a tick comes
every minute."""


def judge_look(look: Look, memory: Memory) -> Health:
    """Judge a run by what a look has found, and bring the sums in its memory up to date."""
    memory.trend = follow(memory.trend, look.folder, look.record)
    return judge(judged_steps(look), first=look.first, trend=memory.trend, facts=facts_of(look))


def judged_steps(look: Look) -> list[Step]:
    """Return the steps that a judgement looks at. A resumed run is judged by those of its attempt,
    as what was wrong with the attempt before may be mended; once it has ended, by all."""
    if look.record.ended or look.record.attempt == 1:
        return look.steps
    return [step for step in look.steps if (step.get("time") or 0.0) >= look.record.attempt_since]


def judge_ended(store: RunStore, record: RunRecord) -> RunRecord:
    """Judge a run that has ended, unless that was done, and return its record with the judgement in
    it. What keeps the judgement from being made or written is logged."""
    if not record.has_ended or (record.health or {}).get("final"):
        return record
    try:
        health = _judged(store, record, keep=True)
        return store.update(record.run_id, if_attempt=record.attempt, health=health)
    except Exception as error:  # a disk that is full, or damage: neither may hide the run
        log.warning("run %s was not judged at its end: %s", record.run_id, error)
        return record


def judge_shown(store: RunStore, record: RunRecord) -> RunRecord:
    """Return the record with a judgement that is up to date, for whoever is shown the run. That of
    a living run is not written: it is the monitor's."""
    if record.has_ended:
        return judge_ended(store, record)
    looked_at = (record.health or {}).get("at")
    if looked_at is not None and seconds_between(looked_at) < FRESH_S:
        return record
    try:
        return record.model_copy(update={"health": _judged(store, record, keep=False)})
    except Exception as error:
        log.warning("run %s was not judged: %s", record.run_id, error)
        return record


def judge_list(store: RunStore, records: list[RunRecord]) -> list[RunRecord]:
    """Return the records, those of the newest `MOST_JUDGED` runs as `judge_shown` returns them."""
    return [*(judge_shown(store, record) for record in records[:MOST_JUDGED]), *records[MOST_JUDGED:]]


def _judged(store: RunStore, record: RunRecord, *, keep: bool) -> dict[str, Any]:
    look = look_at_files(store, record)
    memory = load_memory(look.folder, record)
    health = judge_look(look, memory)
    if keep:
        save_memory(look.folder, memory)
    return health_entry(look, health)


def health_entry(look: Look, health: Health, stall: Stall | None = None) -> dict[str, Any]:
    """Return what the record keeps of a judgement. `final` marks that of a run which has ended."""
    last = look.steps[-1] if look.steps else {}
    held_out = find_newest_result(look.record, look.steps)
    return {
        **health.model_dump(),
        "step": last.get("step"),
        "reward": last.get("reward/mean"),
        "held_out": held_out.percent_correct if held_out else None,
        "stalled": stall.model_dump() if stall else None,
        "budget": compute_budget_shares(look.limits, look.spent),
        "spent": look.spent.model_dump(),
        "at": now_iso(),
        "final": look.record.ended,
    }


def facts_of(look: Look) -> RunFacts:
    """Return what is known about the run beside its steps."""
    record, config = look.record, look.config
    known = look.folder.checkpoints
    facts: dict[str, Any] = {
        "run_id": record.run_id,
        "environment": _environment(record.environment, record.environment_file),
        "profile": record.profile,
        "total_steps": record.total_steps,
        "batch_size": record.batch_size,
        "ended": record.ended,
        "status": record.status,
        "error": record.error,
        "checkpoints": tuple(manifest.step for manifest in Checkpoints(known).list_intact()),
        "tunable": _tunable(record.profile),
        "tiny_model": Path(record.base_model).parent == look.folder.path.parent.parent / "models",
        "counts": look.tally or {},
    }
    if config is not None:
        facts |= {
            "batch_size": config.env.batch_size,
            "group_size": config.env.group_size,
            "learning_rate": config.tinker.learning_rate,
            "max_token_length": config.env.max_token_length,
            "others": tuple(
                f"{_environment(name, code.environment_file)}={config.env.mixture.get(name, {}).get('weight', 1)}"
                for name, code in record.mixture.items()
            ),
        }
    if not facts["tiny_model"]:
        facts["model"] = record.base_model
    return RunFacts(**facts)


def _environment(name: str, file: str) -> str:
    """Return the environment's name if it lies among the others, else its file."""
    return name if Path(file).parent in paths.environment_dirs() else file


@functools.cache
def _tunable(profile: str) -> frozenset[str]:
    try:
        fields = ConfigFields(profile)
        return frozenset(name for name in ADVISED if fields.find(name).lock_reason is None)
    except (LachesisError, KeyError):
        return frozenset()
