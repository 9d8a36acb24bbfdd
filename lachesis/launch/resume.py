"""Continue a run that has ended, as a new attempt from its newest checkpoint."""

from pathlib import Path
from typing import Any

from lachesis.base.errors import RunStateError, StorageError
from lachesis.base.files import make_private_folder, storage_errors, write_private
from lachesis.base.json_text import Json
from lachesis.base.timestamps import now_iso
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.field_edits import replace_resumed_values
from lachesis.config.launch_spec import STEPS_FIELD
from lachesis.config.profiles import check_profile
from lachesis.config.run_config import RunConfig
from lachesis.launch.choose_model import KeyNames
from lachesis.runs.folder import RunDir
from lachesis.runs.host_clock import make_host_fields
from lachesis.runs.record import RunRecord, describe_attempt, get_attempt_duration_s
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.runs.suggested_commands import advise_new_run
from lachesis.spending import agent_limits
from lachesis.spending.budgets import find_exceeded_limit, read_budget_usage
from lachesis.spending.ledger import hold_ledger


def make_next_attempt_changes(record: RunRecord) -> dict[str, Any]:
    """Return the changes to the record of a run that continues from its newest checkpoint."""
    past_attempts = list(record.past_attempts)
    # A flow that was killed goes on with an attempt whose end nobody has recorded.
    if record.attempt not in {past.attempt for past in past_attempts}:
        past_attempts.append(describe_attempt(record))
    return {
        "past_attempts": past_attempts,
        "status": "pending",
        "phase": "queued",
        "error": None,
        "stop_cause": None,
        "stop_reason": None,
        "end_cause": None,
        "is_end_handled": False,
        "resume_requested": False,
        "resumed": None,
        "health": None,
        "attempt": record.attempt + 1,
        "services": {},
        "started_at": None,
        "ended_at": None,
        "earlier_hours": record.earlier_hours
        + (get_attempt_duration_s(record) / 3600 if record.has_ended else 0.0),
        "began_monotonic_s": None,
        **make_host_fields(),
        "boot_id": None,
        "attempt_duration_s": None,
        "queued_at": now_iso(),
        # the previous attempt's flow run has ended; that says nothing about this attempt
        "flow_run_id": None,
        "flow_pid": None,
    }


def prepare_resume(
    store: RunStore,
    record: RunRecord,
    changes: Json | None,
    key_names: KeyNames,
    *,
    by_owner: bool = False,
) -> tuple[Json, RunConfig | None]:
    """Check that an ended run can continue; nothing is written.

    Args:
        store: The runs of this home.
        record: The record of the run, which has ended.
        changes: New values of the run's budgets and of `total_steps`. Without them, a run that has
            completed or whose budget is used up would end again at once, so it is refused.
        key_names: The keys that `lachesis serve` has; see `lachesis.launch.resolve`.
        by_owner: Whether the owner of this installation resumes it, and no agent.

    Returns:
        What changes in the record, and the configuration if that changes.

    Raises:
        RunStateError: The run has completed its steps, or a budget is used up.
        LachesisError: The profile lacks something here, or no checkpoint is complete.
    """
    run_dir = store.dir(record.run_id)
    config = asked_config = read_effective_config(run_dir)
    if changes:
        hint = advise_new_run(record, _find_newest_step(run_dir), changes)
        config = replace_resumed_values(config, changes, hint, is_owner=by_owner)
    # An agent may not go on with more money than the owner's policy leaves to it.
    if not by_owner:
        config = agent_limits.restrict_run(config, store, record)
    is_new_total = any(name.endswith("total_steps") for name in changes or ())
    _require_steps_left(record, run_dir, config.env.total_steps, is_new_total=is_new_total)
    check_profile(record.profile, key_names, backend=config.tinker.backend)
    Checkpoints(run_dir.checkpoints).find_resumable()  # raises when none is complete
    _require_budget(record, run_dir, config)
    changed_values = _list_changed_values(asked_config, config)
    record_changes: Json = {"resume_changes": {**record.resume_changes, **changed_values}}
    if is_new_total:
        record_changes["total_steps"] = config.env.total_steps
    if not by_owner:
        record_changes["by_agent"] = True
    return record_changes, config if changed_values else None


def _list_changed_values(old: RunConfig, new: RunConfig) -> Json:
    """Return the steps and limits in which a configuration differs from another, by field."""
    old_values, new_values = old.limits.model_dump(), new.limits.model_dump()
    changed = {
        f"limits.{name}": value for name, value in new_values.items() if value != old_values[name]
    }
    if new.env.total_steps != old.env.total_steps:
        changed[STEPS_FIELD] = new.env.total_steps
    return changed


def _require_steps_left(
    record: RunRecord, run_dir: RunDir, total_steps: int, *, is_new_total: bool
) -> None:
    """Raise RunStateError when the run has no step left to make.

    Args:
        record: The run.
        run_dir: Its folder.
        total_steps: The number of its last step.
        is_new_total: Whether this number was given for the resume.
    """
    newest_step = _find_newest_step(run_dir)
    num_made = newest_step or 0
    if is_new_total and total_steps <= num_made:
        raise RunStateError(
            f"total_steps is {total_steps}, and run {record.run_id} has made {num_made} steps; "
            f"allowed: a number above {num_made}"
        )
    if record.status == "completed" and not is_new_total:
        raise RunStateError(
            f"run {record.run_id} has completed its {record.total_steps} steps; `lachesis "
            f"resume {record.run_id} --set total_steps={2 * record.total_steps}` trains on"
            f"{advise_new_run(record, newest_step, (), 'train with other settings')}"
        )


def _find_newest_step(run_dir: RunDir) -> int | None:
    newest = Checkpoints(run_dir.checkpoints).find_newest()
    return newest.step if newest else None


def _require_budget(record: RunRecord, run_dir: RunDir, config: RunConfig) -> None:
    """Raise RunStateError when the run has used up one of its budgets."""
    if exceeded := find_exceeded_limit(config.limits, read_budget_usage(run_dir, record)):
        value = exceeded.propose_limit()
        raise RunStateError(
            f"run {record.run_id} has used up its {exceeded.describe()}; raise it to go on: "
            f"`lachesis resume {record.run_id} --set limits.{exceeded.field}={value}`, or "
            f'limits={{"{exceeded.field}": {value}}} of rl_start_training'
        )


def begin_next_attempt(
    store: RunStore,
    record: RunRecord,
    changes: Json,
    config: RunConfig | None = None,
    *,
    by_owner: bool = True,
) -> tuple[RunRecord, Json]:
    """Queue an ended run again as its next attempt, and promise it the money of its limit.

    Of several calls at once one makes the attempt, and all get its record.

    Args:
        store: The runs of this home.
        record: The run.
        changes: What changes in its record besides.
        config: The configuration of the new attempt, if it is not that of the last one.
        by_owner: Whether the owner of this installation resumes it; for anybody else the owner's
            policy decides.

    Returns:
        The record, and the fields of the record before, which undo the attempt. They are empty if
            another process has made the attempt, which then submits it.

    Raises:
        PolicyError: What the policy leaves to the run is less than its limit.
        StorageError: The disk refused a write; the run is then as it was.
    """
    run_dir = store.dir(record.run_id)
    attempt_changes: Json = {**make_next_attempt_changes(record), **changes}
    next_record = record.model_copy(update=attempt_changes)
    config_file = run_dir.get_attempt_config(next_record.attempt)
    run_config = config or read_effective_config(run_dir)
    with hold_ledger(store.home) as ledger:
        newest = store.load(record.run_id)
        if newest.attempt != record.attempt:
            return newest, {}
        if not by_owner:
            agent_limits.restrict_run(run_config, store, record)
        ledger.promise_run(store, next_record, run_config.limits.max_cost_usd)
        try:
            if config is not None:
                _write_config(config_file, config)
            run_dir.stop_file.unlink(missing_ok=True)
            queued_record = store.update(record.run_id, **attempt_changes)
        except StorageError:
            config_file.unlink(missing_ok=True)
            ledger.withdraw(next_record.submission_key)
            raise
    return queued_record, record.model_dump(include=set(attempt_changes))


def _write_config(file: Path, config: RunConfig) -> None:
    """Write the configuration of an attempt before anybody can begin the attempt."""
    with storage_errors(file):
        make_private_folder(file.parent)
    write_private(file, config.to_yaml())


def undo_attempt(store: RunStore, queued_record: RunRecord, former_fields: Json) -> None:
    """Take back an attempt that Prefect has refused, unless the run has gone on meanwhile."""

    def make_changes(newest: RunRecord) -> Json:
        has_gone_on = newest.attempt != queued_record.attempt or newest.flow_run_id is not None
        return {} if has_gone_on else former_fields

    undone = store.change(queued_record.run_id, make_changes)
    if undone.attempt == queued_record.attempt:
        return
    run_dir = store.dir(queued_record.run_id)
    run_dir.get_attempt_config(queued_record.attempt).unlink(missing_ok=True)
    with hold_ledger(store.home) as ledger:
        ledger.withdraw(queued_record.submission_key)


def needs_new_attempt(record: RunRecord) -> bool:
    """Return whether a new attempt is needed, because a flow has begun the current attempt."""
    return record.started_at is not None
