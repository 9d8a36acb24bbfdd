"""Show an agent what a start or a resume would do, without doing it."""

from __future__ import annotations

from lachesis.agent import schemas, views
from lachesis.agent.session import AgentSession, make_launch_request
from lachesis.config.edits import get_editable_values
from lachesis.config.profiles import list_missing_keys
from lachesis.orchestration import server
from lachesis.orchestration.launch_inputs import find_model_problem
from lachesis.runs.checkpoints import Checkpoints


def preview_start(session: AgentSession, start_from: str | None = None) -> schemas.StartAnswer:
    """Return what a start would do now; nothing is written or submitted."""
    draft = session.require_draft(session.session_file.read()).model_copy(
        update={"start_from": start_from}
    )
    launch = make_launch_request(draft)
    config, plan = session.service.preview(launch)
    missing = list_missing_keys(draft.profile, server.read_key_names())
    key_problem = missing and f"{', '.join(missing)} is not in the environment of `lachesis serve`"
    problem = key_problem or find_model_problem(launch, config, session.service.store.home)
    return schemas.StartAnswer(
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
        **views.drop_empty(problem=problem and f"it cannot start: {problem}"),
    )


def preview_resume(session: AgentSession, run_id: str) -> schemas.StartAnswer:
    """Return what resuming the run would do; nothing is changed."""
    record = session.service.get_run(run_id)
    newest_checkpoint = Checkpoints(session.service.store.dir(run_id).checkpoints).find_newest()
    if newest_checkpoint:
        effect = f"continue from its checkpoint of step {newest_checkpoint.step}"
    else:
        effect = "start again from the beginning, because it has no checkpoint,"
    return schemas.StartAnswer(
        message=f"nothing was started; run {run_id} ({record.status}) would {effect} on profile "
        f"{record.profile}",
        run_id=run_id,
        status=record.status,
        environment=record.environment,
        config=session.service.read_editable_values(record),
        wandb_project=record.wandb_project,
        profile=record.profile,
        dry_run=True,
        next_steps=[views.NEXT_STEP_CALLS["resume"].format(run=run_id)],
    )
