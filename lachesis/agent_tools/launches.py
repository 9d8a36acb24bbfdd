"""Show an agent what a start or a resume would do, without doing it."""

from __future__ import annotations

from lachesis.agent_tools import views
from lachesis.agent_tools.draft import SCHEMA_TIMEOUT_S, AgentSession
from lachesis.agent_tools.schemas import StartAnswer
from lachesis.base.json_text import Json
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.field_edits import get_editable_values
from lachesis.config.profiles import PROFILES
from lachesis.inference_tests.forecast import Forecast
from lachesis.operations.launches import preview_launch, require_keys
from lachesis.operations.runs import get_run, read_editable_values
from lachesis.spending.confirmation import describe_cost, needs_confirmation


def is_paid(session: AgentSession, run_id: str | None = None) -> bool:
    """Return whether the draft, or the given run, trains where it may cost money."""
    if run_id:
        profile = session.store.load(run_id).profile
    else:
        profile = session.require_draft(session.session_file.read()).profile
    if profile in PROFILES:
        return PROFILES[profile].is_paid
    return True


def must_confirm(session: AgentSession, run_id: str | None = None) -> bool:
    """Return whether a start of the draft, or a resume of the run, has to be confirmed."""
    if run_id:
        return is_paid(session, run_id)
    draft = session.require_draft(session.session_file.read())
    return needs_confirmation(draft.profile, draft.list_edits())


def preview_start(session: AgentSession, from_checkpoint: str | None = None) -> StartAnswer:
    """Return what a start would do now; nothing is written or submitted."""
    draft = session.require_draft(session.session_file.read()).model_copy(
        update={"from_checkpoint": from_checkpoint}
    )
    preview = preview_launch(session.store, draft, schema_timeout_s=SCHEMA_TIMEOUT_S)
    config, plan, forecast = preview.launch.config, preview.plan, preview.record.forecast
    return StartAnswer(
        message="nothing was started; this is what rl_start_training() would start",
        environment=draft.environment,
        config=get_editable_values(config),
        wandb_project=config.tinker.wandb_project,
        profile=draft.profile,
        dry_run=True,
        config_yaml=plan.config.to_yaml(),
        services=views.list_planned_services(plan),
        base_model=config.openai.model_name,
        next_steps=["rl_start_training()"],
        **views.drop_empty(
            problem=preview.problem and f"it cannot start: {preview.problem}",
            forecast=Forecast.model_validate(forecast) if forecast else None,
        ),
    )


def preview_resume(session: AgentSession, run_id: str) -> StartAnswer:
    """Return what resuming the run would do; nothing is changed."""
    record = get_run(session.store, run_id)
    newest_checkpoint = Checkpoints(session.store.dir(run_id).checkpoints).find_newest()
    if newest_checkpoint:
        effect = f"continue from its checkpoint of step {newest_checkpoint.step}"
    else:
        effect = "start again from the beginning, because it has no checkpoint,"
    return StartAnswer(
        message=f"nothing was started; run {run_id} ({record.status}) would {effect} on profile "
        f"{record.profile}",
        run_id=run_id,
        status=record.status,
        environment=record.environment,
        config=read_editable_values(session.store, record),
        wandb_project=record.wandb_project,
        profile=record.profile,
        dry_run=True,
        next_steps=[views.NEXT_STEP_CALLS["resume"].format(run=run_id)],
    )


def ask_for_confirmation(
    session: AgentSession, resume: str | None, from_checkpoint: str | None
) -> StartAnswer:
    """Return what a paid start or resume would do and cost, and how to agree to it.

    Raises:
        MissingKeyError: It could not start anyway.
    """
    forecast: Json | None = None
    if resume is not None:
        preview = preview_resume(session, resume)
        forecast = session.store.load(resume).forecast
    else:
        draft = session.require_draft(session.session_file.read())
        require_keys(draft.profile)
        preview = preview_start(session, from_checkpoint)
        if preview.forecast is not None:
            forecast = preview.forecast.model_dump(mode="json")
    update = {
        "message": f"{preview.message}. Profile {preview.profile} may cost money: "
        f"{describe_cost(forecast)}. Show this to the user",
        "confirmation_required": True,
        "next_steps": [
            "ask the user; only after their yes call rl_start_training with the same arguments and "
            "confirm=true"
        ],
    }
    return preview.model_copy(update=update)
