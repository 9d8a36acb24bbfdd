"""List and select environments, and show and edit the draft of a configuration.

The draft is a `LaunchSpec`: what would be started now.
"""

from dataclasses import asdict

from lachesis.agent_tools.answers import drop_empty
from lachesis.agent_tools.session import SCHEMA_TIMEOUT_S, AgentSession
from lachesis.base import paths
from lachesis.base.errors import RunStateError
from lachesis.base.json_text import Json
from lachesis.config.backends import BACKEND_FIELDS
from lachesis.config.installation_settings import get_default_profile
from lachesis.config.launch_spec import LaunchSpec, read_spec
from lachesis.config.profiles import describe_missing_keys
from lachesis.operations.environments import scan_environments
from lachesis.operations.launches import describe_launch, edit_launch, find_missing_keys


def list_environments() -> Json:
    """Return the environments that are found now, with the next steps of an agent."""
    scan = scan_environments()
    environments = [asdict(environment) for environment in scan.environments]
    for environment in environments:
        del environment["config_class"]
    return {
        "environments": environments,
        "count": len(environments),
        "tips": [
            "rl_select_environment(name) chooses one; its answer has the fields and their values",
            "rl_test_inference() tests it before anything is trained",
            "rl_check_environment(name, new=true) creates one of your own and checks it; your "
            f"files are found in {' and '.join(map(str, paths.environment_dirs()))} (more: "
            "LACHESIS_ENVIRONMENTS)",
        ],
        **drop_empty(problems=scan.problems, clashes=scan.clashes),
    }


def select_environment(
    session: AgentSession, name: str, profile: str | None = None, model: str | None = None
) -> Json:
    """Select an environment: replace the draft by a new one with default values."""
    values = {"environment": name, "profile": profile or get_default_profile(), "model": model}
    draft = read_spec(LaunchSpec, {**values, "by_agent": True})
    description = describe_launch(session.store, draft, schema_timeout_s=SCHEMA_TIMEOUT_S)
    missing = find_missing_keys(draft.profile)
    warnings = [description["warning"], description["problem"]]
    if missing:
        warnings.append(describe_missing_keys(draft.profile, missing))
    with session.session_file.change() as state:
        state.draft = draft
    return {
        "message": f"{name} is selected; edit it with rl_edit_config, test it with "
        "rl_test_inference, start it with rl_start_training",
        "environment": name,
        "file_path": description["file_path"],
        "profile": draft.profile,
        "config": _select_editable_values(description),
        "session": session.session_file.name,
        **drop_empty(warning="; ".join(filter(None, warnings))),
    }


def show_draft(session: AgentSession) -> Json:
    """Return the fields of the draft with their values, first the editable, then the locked."""
    draft = session.require_draft()
    description = describe_launch(session.store, draft, schema_timeout_s=SCHEMA_TIMEOUT_S)
    # Fields of another profile would only have to be read.
    others = () if draft.profile == "custom" else BACKEND_FIELDS
    fields = [field for field in description["fields"] if field["name"] not in others]
    return {
        "environment": draft.environment,
        "profile": draft.profile,
        "model": description["model"],
        "configurable_fields": [_show_field(field) for field in fields if not field["locked"]],
        "locked_fields": [_show_locked_field(field) for field in fields if field["locked"]],
        "tip": "rl_edit_config(field, value) changes a configurable field; locked ones belong to "
        "the profile and its operator",
        **drop_empty(problem=description["problem"], warning=description["warning"]),
    }


def edit_draft(session: AgentSession, field: str, value: object) -> Json:
    """Change one field of the draft.

    Raises:
        RunStateError: No environment is selected, or another one was selected meanwhile.
        FieldValueError: The value has the wrong type, or the environment refuses it.
    """
    draft = session.require_draft()
    edited, edited_field, checked_value = edit_launch(session.store, draft, field, value)
    name = f"{edited_field.section}.{edited_field.name}"
    with session.session_file.change() as state:
        newest = state.draft or draft
        if (newest.environment, newest.profile) != (draft.environment, draft.profile):
            raise RunStateError(
                f"{newest.environment} was selected while {name} of {draft.environment} was "
                "edited; nothing was changed"
            )
        # Another call may have edited another field.
        settings = {**newest.settings, name: edited.settings[name]}
        newest = newest.model_copy(update={"settings": settings})
        state.draft = newest
    description = describe_launch(session.store, newest, schema_timeout_s=SCHEMA_TIMEOUT_S)
    return {
        "message": f"{name} is now {checked_value!r}",
        "field": edited_field.name,
        "value": checked_value,
        "config": _select_editable_values(description),
        **drop_empty(problem=description["problem"]),
    }


def _select_editable_values(description: Json) -> Json:
    """Return the values of the fields that an agent can edit."""
    fields = description["fields"]
    return {field["name"]: field["current_value"] for field in fields if not field["locked"]}


def _show_field(field: Json) -> Json:
    """Return an editable field. `allowed` is left out if it only repeats the type."""
    allowed, field_type = field["allowed"], field["type"]
    lists_the_choices = allowed == f"string, one of {field_type.split(' | ')}"
    left_out = {"locked"}
    if lists_the_choices or allowed.replace(" or ", " | ") == field_type:
        left_out.add("allowed")
    return {key: value for key, value in field.items() if key not in left_out}


def _show_locked_field(field: Json) -> Json:
    """Return a locked field with its value and the reason."""
    shown = {key: value for key, value in field.items() if key not in {"locked", "allowed"}}
    return {**shown, "locked_value": field["current_value"], "reason": field["locked"]}
