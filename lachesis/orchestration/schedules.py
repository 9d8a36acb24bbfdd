"""Schedule trainings: make, list and remove schedules of the deployment `train`.

They are schedules of Prefect, so they can also be made, changed and paused on its pages. A
scheduled training is skipped while the one before it, of the same schedule, still lives.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from lachesis.base.errors import ConfigError, FieldValueError, ServerDownError, shorten
from lachesis.base.json_text import Json
from lachesis.base.paths import to_safe_name
from lachesis.base.response_model import ResponseModel
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.orchestration.server import TRAINING_FLOW, find_deployment
from lachesis.runs.run_record import RunRecord
from lachesis.runs.store import RunStore

# The checkpoints of a schedule's last run that its next run may start from.
LAST_RUN_CHECKPOINTS = ("last", "best")
# What Prefect calls the schedule that has made a flow run if that has no slug.
NAMES_WITHOUT_SLUG = ("CronSchedule", "IntervalSchedule", "RRuleSchedule")


class TrainingSchedule(ResponseModel):
    """Describe a schedule of trainings."""

    name: str
    """Its name; a schedule that was made on a page without one is called `person-` and a number."""
    when: str
    """Its cron line, interval or calendar rule."""
    timezone: str = "UTC"
    active: bool = True
    """Whether it starts trainings; a paused one does not."""
    parameters: Json = Field(default_factory=dict)
    """The parameters of the deployment `train` that its runs have."""
    next_start: str | None = None
    """When the next training starts, in UTC; null while it is paused or not yet planned."""
    last_run: str | None = None
    """The id of its newest run, if there is one."""
    last_status: str | None = None


def create_schedule(home: Path, cron: str, timezone: str, parameters: Mapping[str, Any]) -> str:
    """Create a schedule of trainings and return its name.

    Args:
        home: The home whose runner trains.
        cron: Five fields: minute, hour, day of the month, month, day of the week.
        timezone: The name of a time zone, as in `Europe/Berlin`.
        parameters: The parameters of each training, without `run_id`.

    Raises:
        FieldValueError: The cron line or the time zone is not valid.
        ServerDownError: The server does not respond.
    """
    api, deployment = find_deployment(TRAINING_FLOW, home)
    title = parameters.get("name") or Path(parameters["environment"]).stem
    name = f"{to_safe_name(title)}-{secrets.token_hex(2)}"
    schedule = {
        "schedule": {"cron": cron, "timezone": timezone},
        "active": True,
        "parameters": dict(parameters),
        "slug": name,
    }
    try:
        api.create_schedule(deployment["id"], schedule)
    except ServerDownError as error:
        if error.details.get("status") != 422:
            raise
        raise FieldValueError(
            f"the schedule is {shorten(repr(cron))} in the time zone {shorten(repr(timezone))}; "
            "allowed: a cron line of five fields, as in '0 2 * * *' for 2 o'clock every night, "
            "and the name of a time zone, as in 'Europe/Berlin'"
        ) from error
    return name


def list_schedules(store: RunStore) -> list[TrainingSchedule]:
    """Return the schedules of trainings, also those that were made on the pages of Prefect.

    Raises:
        ServerDownError: The server does not respond.
    """
    api, deployment = find_deployment(TRAINING_FLOW, store.home)
    next_starts = _find_next_starts(api, deployment["id"])
    records = store.all()
    return [
        _describe_schedule(schedule, next_starts, records) for schedule in deployment["schedules"]
    ]


def remove_schedule(home: Path, name: str) -> None:
    """Delete a schedule; runs that it has started go on.

    Raises:
        ConfigError: There is no schedule of this name.
        ServerDownError: The server does not respond.
    """
    api, deployment = find_deployment(TRAINING_FLOW, home)
    ids = {make_name(schedule): schedule["id"] for schedule in deployment["schedules"]}
    if name not in ids:
        raise ConfigError(
            f"there is no schedule {shorten(repr(name), 60)}; existing: {', '.join(ids) or 'none'}"
        )
    api.delete_schedule(deployment["id"], ids[name])


def make_name(schedule: Mapping[str, Any]) -> str:
    """Return the name of a schedule of Prefect.

    The runner gives one without a slug the same name when it starts.
    """
    return str(schedule.get("slug") or f"person-{str(schedule['id'])[:8]}")


def find_schedule_of_flow_run(flow_run: Mapping[str, Any]) -> str | None:
    """Return the name of the schedule that has made a flow run, or None if none has."""
    creator = flow_run.get("created_by") or {}
    if creator.get("type") != "SCHEDULE":
        return None
    slug = creator.get("display_value")
    if slug in NAMES_WITHOUT_SLUG:
        slug = None
    return make_name({"slug": slug, "id": creator.get("id")})


def find_runs(store: RunStore, schedule: str) -> list[RunRecord]:
    """Return the runs of a schedule, the newest first."""
    return [record for record in store.all() if record.schedule == schedule]


def _find_next_starts(api: PrefectApi, deployment_id: str) -> dict[str, str]:
    """Return when each schedule starts its next training, by the schedule's name."""
    next_starts: dict[str, str] = {}
    for flow_run in api.list_waiting_flow_runs(deployment_id):
        name = find_schedule_of_flow_run(flow_run)
        start = flow_run.get("next_scheduled_start_time") or flow_run.get("expected_start_time")
        if name is not None and start:
            next_starts[name] = min(start, next_starts.get(name, start))
    return next_starts


def _describe_schedule(
    schedule: Mapping[str, Any], next_starts: Mapping[str, str], records: list[RunRecord]
) -> TrainingSchedule:
    name, rule = make_name(schedule), schedule["schedule"]
    newest = next((record for record in records if record.schedule == name), None)
    return TrainingSchedule(
        name=name,
        when=str(rule.get("cron") or rule.get("rrule") or f"every {rule.get('interval')} s"),
        timezone=rule.get("timezone") or "UTC",
        active=schedule["active"],
        parameters=schedule.get("parameters") or {},
        next_start=next_starts.get(name),
        last_run=newest and newest.run_id,
        last_status=newest and newest.status,
    )
