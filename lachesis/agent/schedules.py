"""Schedule the draft of a session, and list and remove schedules."""

from __future__ import annotations

from dataclasses import replace

from lachesis.agent import schemas
from lachesis.agent.session import AgentSession, make_launch_request
from lachesis.orchestration import schedules
from lachesis.orchestration.confirmation import describe_cost
from lachesis.orchestration.flow_parameters import make_scheduled_parameters


def schedule_draft(
    session: AgentSession,
    cron: str,
    timezone: str,
    start_from: str | None,
    *,
    confirmed: bool = False,
) -> schemas.ScheduleAnswer:
    """Start the draft again and again by a schedule.

    Raises:
        LachesisError: The draft could not start now, or the schedule is not valid.
    """
    draft = session.require_draft(session.session_file.read())
    request = replace(make_launch_request(draft), confirmed=confirmed)
    if start_from not in schedules.LAST_RUN_CHECKPOINTS:
        request = replace(request, start_from=start_from)
    launch = session.service.check(request)
    parameters = make_scheduled_parameters(
        request, launch.environment.file_path, launch.set_fields, start_from
    )
    name = schedules.create_schedule(session.service.store.home, cron, timezone, parameters)
    return schemas.ScheduleAnswer(
        message=f"schedule {name} starts this training at {cron} ({timezone}); a training is "
        "skipped while the one before it still runs",
        schedule=name,
        parameters=parameters,
        next_steps=["rl_list_schedules()", f"rl_schedule_training(remove={name!r})"],
    )


def list_schedules(session: AgentSession) -> schemas.ScheduleList:
    """Return all schedules of trainings of this home."""
    entries = schedules.list_schedules(session.service.store)
    return schemas.ScheduleList(schedules=entries, count=len(entries))


def remove_schedule(session: AgentSession, name: str) -> schemas.ScheduleAnswer:
    """Delete a schedule; its runs go on."""
    schedules.remove_schedule(session.service.store.home, name)
    return schemas.ScheduleAnswer(
        message=f"schedule {name} was removed; runs that it has started go on", schedule=name
    )


def preview_schedule(session: AgentSession, cron: str, timezone: str) -> schemas.ScheduleAnswer:
    """Return what a schedule on a profile that may cost money would do."""
    draft = session.require_draft(session.session_file.read())
    preview = session.service.preview_record(make_launch_request(draft))
    return schemas.ScheduleAnswer(
        message=f"nothing was scheduled: {draft.environment} would be trained at {cron} "
        f"({timezone}) again and again on profile {draft.profile}, which may cost money each "
        f"time: {describe_cost(preview.record.forecast)}; ask the user, then call again with "
        "confirm=true",
        schedule=None,
        confirmation_required=True,
    )
