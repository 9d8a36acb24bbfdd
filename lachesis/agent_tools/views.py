"""Assemble parts of the answers to agents."""

from __future__ import annotations

import time

from lachesis.agent_tools import schemas
from lachesis.agent_tools.session import LastReport
from lachesis.base.json_text import Json
from lachesis.inference_tests.store import InferenceTest
from lachesis.operations.launches import ServicePlan

# Next steps as tool calls.
NEXT_STEP_CALLS = {
    "status": 'rl_check_status(run_id="{run}")',
    "logs": "read the file `logs.{service}`",
    "stop": 'rl_stop_training(run_id="{run}")',
    "resume": 'rl_start_training(resume="{run}")',
    "raise_budget": 'rl_start_training(resume="{run}", limits={{"{limit}": {value}}})',
    "check": 'rl_check_environment(environment="{environment}")',
    "results": 'rl_get_results(run_id="{run}")',
    "report": "the file that `lachesis report {run}` writes is for people",
    "weights": "hand over `weights.adapter`, a folder, or `weights.best.adapter` where there is a "
    "better checkpoint; "
    "`lachesis export {run} --checkpoint best --to DIR` copies the best one with checksums",
}


def build_rate_limited_status(
    last_report: LastReport, remaining_s: float
) -> schemas.RateLimitedStatus:
    """Return the last report again, with the time when a new one is due."""
    next_check_s, age_s = max(1, round(remaining_s)), round(time.time() - last_report.reported_at)
    stall = (last_report.report.get("health") or {}).get("stalled")
    if stall:
        outlook = f"The run has stalled in {stall['part']}; what happens next is reported at once"
    else:
        outlook = (
            "The run continues by itself; a stall, a new judgement and its end are reported at once"
        )
    return schemas.RateLimitedStatus(
        **last_report.report,
        rate_limited=True,
        message=f"this is the report of {age_s} s ago; the next live one is due in {next_check_s} "
        f"s. {outlook}",
        next_check_in_seconds=next_check_s,
        reported_seconds_ago=age_s,
    )


def list_steps_after_test(test: InferenceTest) -> list[str]:
    """Return the next steps that follow from the result of a test."""
    summary = (test.result or {}).get("summary", {})
    verdict = summary.get("verdict")
    if verdict == "broken" or not summary.get("environment_working"):
        return [
            "read `error`, `stages` and the verdicts in `models_tested`, fix the cause, then "
            "rl_test_inference()"
        ]
    if verdict == "too hard":
        return [
            "there is almost no reward to learn from: easier items, a stronger model, a larger "
            "group_size; then test again"
        ]
    if verdict == "too easy":
        return ["nothing is left to learn: harder items; then test again"]
    return ["rl_start_training()"]


def list_planned_services(plan: ServicePlan) -> list[schemas.PlannedService]:
    """Return the processes of a run as a preview shows them."""
    return [
        schemas.PlannedService(name=spec.name, port=spec.port, command=spec.argv, log=str(spec.log))
        for spec in plan.services
    ]


def select_editable_values(launch_description: Json) -> Json:
    """Return the values of the fields that an agent can edit."""
    return {
        field["name"]: field["current_value"]
        for field in launch_description["fields"]
        if not field["locked"]
    }


def build_field_view(described: Json) -> schemas.FieldView:
    """Return an editable field. `allowed` is left out if it only repeats the type."""
    allowed, field_type = described["allowed"], described["type"]
    lists_the_choices = allowed == f"string, one of {field_type.split(' | ')}"
    is_redundant = lists_the_choices or allowed.replace(" or ", " | ") == field_type
    excluded_keys = {"locked", "allowed"} if is_redundant else {"locked"}
    return schemas.FieldView(
        **{key: value for key, value in described.items() if key not in excluded_keys}
    )


def build_locked_field_view(described: Json) -> schemas.LockedFieldView:
    """Return a locked field with its value and the reason."""
    shown = {key: value for key, value in described.items() if key not in {"locked", "allowed"}}
    return schemas.LockedFieldView(
        **shown, locked_value=described["current_value"], reason=described["locked"]
    )


def drop_empty(**values: object) -> Json:
    """Return the values that are not empty."""
    return {key: value for key, value in values.items() if value}
