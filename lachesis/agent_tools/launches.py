"""Start, resume and stop runs for an agent, with previews and the confirmation of a preview."""

import time
from typing import Any

from lachesis.agent_tools.answers import NEXT_STEP_CALLS, drop_empty
from lachesis.agent_tools.run_reports import forget_last_report
from lachesis.agent_tools.session import SCHEMA_TIMEOUT_S, AgentSession, SessionState, StartedRun
from lachesis.base.errors import ConfigError, LachesisError
from lachesis.base.json_text import Json
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.field_edits import get_editable_values
from lachesis.config.launch_spec import LaunchSpec
from lachesis.config.owner_policy import load_policy
from lachesis.config.profiles import PROFILES
from lachesis.operations import runs
from lachesis.operations.launches import (
    describe_default_model,
    preview_launch,
    require_keys,
    start_run,
)
from lachesis.reporting.run_view import find_log_files
from lachesis.runs.record import RunRecord
from lachesis.spending.confirmation import describe_cost, make_fingerprint, needs_confirmation


def start_draft(
    session: AgentSession,
    *,
    key: str | None = None,
    require_validation: bool = False,
    from_checkpoint: str | None = None,
    confirmed: bool = False,
) -> Json:
    """Start the draft. The same key returns the existing run.

    The intended start is written to disk first, so that an agent that is killed meanwhile and calls
    again gets the same run.
    """
    draft = session.require_draft().model_copy(
        update={"from_checkpoint": from_checkpoint, "require_validation": require_validation}
    )
    with session.session_file.change() as state:
        start = _find_earlier_start(state, draft, key)
        is_repeated = start is not None
        if start is None:
            run_id = session.store.new_id()
            start = StartedRun(run_id=run_id, draft=draft, started_at=time.time(), key=key)
            state.starts.append(start)
    try:
        with session.session_file.hold(f"start-{start.run_id}"):
            spec = draft.model_copy(update={"confirmed": confirmed})
            record = start_run(session.store, spec, start.run_id, schema_timeout_s=SCHEMA_TIMEOUT_S)
    except LachesisError:
        if not is_repeated:
            with session.session_file.change() as state:
                state.starts = [kept for kept in state.starts if kept.run_id != start.run_id]
        raise
    if not is_repeated:
        model_note = describe_default_model(draft, record.base_model)
        return _answer_start(session, record, model_note=model_note)
    return _answer_start(
        session,
        runs.get_run(session.store, record.run_id),
        "was started by the same call earlier; another idempotency_key starts another one",
    )


def _find_earlier_start(
    state: SessionState, draft: LaunchSpec, key: str | None
) -> StartedRun | None:
    """Return the earlier start with the same key, or None.

    Raises:
        ConfigError: The key belongs to a different draft.
    """
    start = next((start for start in state.starts if key is not None and start.key == key), None)
    if start is not None and start.draft != draft:
        raise ConfigError(
            f"idempotency_key {key!r} belongs to run {start.run_id}, which has another "
            "configuration; use a new key"
        )
    return start


def resume(session: AgentSession, run_id: str, limits: Json | None = None) -> Json:
    """Resume an ended run, with new limits if given; leave a living run as it is."""
    is_alive = not runs.get_run(session.store, run_id).has_ended
    forget_last_report(session, run_id)
    record = runs.resume_run(session.store, run_id, limits)
    reason = "has not ended, so there is nothing to resume" if is_alive else ""
    return _answer_start(session, record, reason)


def stop(session: AgentSession, run_id: str) -> Json:
    """Ask a run to save a checkpoint and end."""
    runs.get_run(session.store, run_id)  # raises for an unknown id
    forget_last_report(session, run_id)
    return dict(runs.stop_run(session.store, run_id, by_agent=True))


def _answer_start(
    session: AgentSession,
    record: RunRecord,
    not_started_reason: str = "",
    model_note: str | None = None,
) -> Json:
    """Return what a start answers: run, status, links, and why nothing started, if so.

    Args:
        session: The session that asks.
        record: The run.
        not_started_reason: Why nothing was started, if so.
        model_note: Which model was chosen by default, if so.
    """
    run_id, run_dir = record.run_id, session.store.dir(record.run_id)
    queue = runs.find_queue_position(record, session.store.home)
    if not_started_reason:
        state_text = f"({record.status}) {not_started_reason}"
    elif record.status == "pending" and record.flow_run_id is None:
        state_text = f"is {record.phase}"
    elif queue:
        state_text = f"is number {queue['place']} in this host's queue"
    else:
        state_text = "is starting"
    status_call = NEXT_STEP_CALLS["status"].format(run=run_id)
    parts = (f"run {run_id} {state_text}", model_note, f"{status_call} reports its status")
    return {
        "message": "; ".join(filter(None, parts)),
        "run_id": run_id,
        "status": "starting" if record.status == "pending" else record.status,
        "environment": record.environment,
        "config": runs.read_editable_values(session.store, record),
        "wandb_project": record.wandb_project,
        "wandb_run_name": record.wandb_run_name,
        "config_path": str(run_dir.config),
        "logs": find_log_files(record, run_dir),
        "ui_url": runs.get_run_url(record),
        "profile": record.profile,
        "next_steps": [f"{status_call} in some minutes; the run continues by itself"],
        **drop_empty(queue=queue, duplicate=bool(not_started_reason)),
    }


def _must_confirm(session: AgentSession, run_id: str | None = None) -> bool:
    """Return whether a start of the draft, or a resume of the run, has to be confirmed."""
    if run_id is None:
        draft = session.require_draft()
        return needs_confirmation(draft.profile, draft.list_edits())
    profile = session.store.load(run_id).profile
    return profile not in PROFILES or PROFILES[profile].is_paid


def preview_start(session: AgentSession, from_checkpoint: str | None = None) -> Json:
    """Return the preview of a start; nothing is written or submitted."""
    draft = session.require_draft().model_copy(update={"from_checkpoint": from_checkpoint})
    preview = preview_launch(session.store, draft, schema_timeout_s=SCHEMA_TIMEOUT_S)
    config, plan = preview.launch.config, preview.plan
    return {
        "message": "nothing was started; this is what rl_start_training() would start",
        "environment": draft.environment,
        "config": get_editable_values(config),
        "wandb_project": config.tinker.wandb_project,
        "profile": draft.profile,
        "dry_run": True,
        "config_yaml": plan.config.to_yaml(),
        "services": [
            {"name": spec.name, "port": spec.port, "command": spec.argv, "log": str(spec.log)}
            for spec in plan.services
        ],
        "base_model": config.openai.model_name,
        "next_steps": ["rl_start_training()"],
        **drop_empty(
            problem=preview.problem and f"it cannot start: {preview.problem}",
            forecast=preview.record.forecast,
        ),
    }


def preview_resume(session: AgentSession, run_id: str) -> Json:
    """Return the preview of resuming a run; nothing is changed."""
    record = runs.get_run(session.store, run_id)
    start = Checkpoints(session.store.dir(run_id).checkpoints).describe_start()
    return {
        "message": f"nothing was started; on profile {record.profile} run {run_id} "
        f"({record.status}) would continue {start}",
        "run_id": run_id,
        "status": record.status,
        "environment": record.environment,
        "config": runs.read_editable_values(session.store, record),
        "wandb_project": record.wandb_project,
        "profile": record.profile,
        "dry_run": True,
        "next_steps": [NEXT_STEP_CALLS["resume"].format(run=run_id)],
    }


def find_missing_yes(
    session: AgentSession,
    confirm: bool | str,
    *,
    resume: str | None = None,
    limits: Json | None = None,
    key: str | None = None,
    **draft_changes: Any,
) -> Json | None:
    """Return the preview that a paid start or resume has to be agreed to; None if that was done.

    Args:
        session: The session that asks.
        confirm: The fingerprint of a preview, or true for the last one that the session has seen.
        resume: The run to resume; by default the draft is started.
        limits: New limits of the resumed run.
        key: The key of the start; the run that was started with it already needs no second yes.
        draft_changes: Fields of the draft that the call sets.

    Raises:
        MissingKeyError: It could not start anyway.
    """
    state = session.session_file.read()
    is_started = key is not None and any(start.key == key for start in state.starts)
    if is_started or not _must_confirm(session, resume):
        return None
    if resume is not None:
        record = session.store.load(resume)
        preview, forecast = preview_resume(session, resume), record.forecast
        shown: Json = {"resume": resume, "attempt": record.attempt, "limits": limits}
        shown |= {"set": record.set_fields, "status": record.status}
    else:
        draft = session.require_draft().model_copy(update=draft_changes)
        require_keys(draft.profile)
        preview = preview_start(session, draft.from_checkpoint)
        forecast = preview.get("forecast")
        shown = {"draft": draft.model_dump(mode="json"), "cost": forecast and forecast["cost_usd"]}
    fingerprint = make_fingerprint(shown)
    if _take_yes(session, confirm, fingerprint):
        return None
    return {
        **preview,
        "message": f"{preview['message']}. Profile {preview['profile']} may cost money: "
        f"{describe_cost(forecast)}. Show this to the user",
        "confirmation_required": True,
        "preview": fingerprint,
        "next_steps": [
            "ask the user; only after their yes call rl_start_training with the same arguments and "
            f'confirm="{fingerprint}"'
        ],
    }


def preview_stop(session: AgentSession, run_id: str, confirm: bool | str) -> Json | None:
    """Return the preview of a stop if the policy asks for a yes that was not given."""
    record = runs.get_run(session.store, run_id)
    if record.has_ended or not load_policy(session.store.home).confirm_stop:
        return None
    fingerprint = make_fingerprint({"stop": run_id, "attempt": record.attempt})
    if _take_yes(session, confirm, fingerprint):
        return None
    return {
        "message": f"nothing was stopped: the owner's policy asks for a yes. Run {run_id} of "
        f"{record.environment} is {record.status}; it would save a checkpoint and end. Ask the "
        f'user, then call again with confirm="{fingerprint}"',
        "run_id": run_id,
        "status": record.status,
        "confirmation_required": True,
        "preview": fingerprint,
    }


def _take_yes(session: AgentSession, confirm: bool | str, fingerprint: str) -> bool:
    """Return whether the session has seen the preview with this fingerprint and agrees to it.

    A yes counts once. Without a yes the fingerprint is kept as that of the newest preview.
    """
    with session.session_file.change() as state:
        is_newest = state.previews[-1:] == [fingerprint]
        is_agreed = confirm == fingerprint or (confirm is True and is_newest)
        is_taken = is_agreed and fingerprint in state.previews
        state.previews = [preview for preview in state.previews if preview != fingerprint]
        if not is_taken:
            state.previews.append(fingerprint)
    return is_taken
