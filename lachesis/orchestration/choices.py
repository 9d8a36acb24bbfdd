"""Keep the lists of environments in the forms of the deployments up to date."""

from __future__ import annotations

from pathlib import Path

from lachesis.base.json_text import Json
from lachesis.catalog.scan import scan_environments
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.orchestration.server import (
    NIGHTLY_FLOW,
    TEST_FLOW,
    TRAINING_FLOW,
    get_deployment_name,
)

# The parameter of each flow that names environments.
ENVIRONMENT_PARAMETERS = {
    TRAINING_FLOW: "environment",
    TEST_FLOW: "environment",
    NIGHTLY_FLOW: "environments",
}


def list_environment_names() -> list[str]:
    """Return the names of the environments that are found now, in alphabetical order."""
    return sorted(environment.name for environment in scan_environments().environments)


def set_choices(field: Json, choices: list[str]) -> None:
    """Let a field of a form, or each item of a field that is a list, have one of these values.

    Without choices every value is allowed, because an empty list would refuse all of them.
    """
    target = _get_target(field)
    if choices:
        target["enum"] = choices
    else:
        target.pop("enum", None)


def _get_target(field: Json) -> Json:
    """Return the schema that holds the choices: that of the field, or of the items of a list."""
    if field.get("type") == "array":
        items: Json = field.setdefault("items", {})
        return items
    return field


def update_environment_choices(home: Path) -> list[str]:
    """Bring the forms of this home's deployments up to date, and return the flows of those that
    have changed.

    Raises:
        ServerDownError: The server does not respond.
    """
    names, changed_flows = list_environment_names(), []
    with PrefectApi().reuse_connection() as api:
        for flow, parameter in ENVIRONMENT_PARAMETERS.items():
            deployment = api.read_deployment(flow, get_deployment_name(flow, home))
            schema = (deployment or {}).get("parameter_openapi_schema") or {}
            field = schema.get("properties", {}).get(parameter)
            if deployment is None or field is None:
                continue
            if _get_target(field).get("enum", []) != names:
                set_choices(field, names)
                api.update_deployment(deployment["id"], {"parameter_openapi_schema": schema})
                changed_flows.append(flow)
    return changed_flows
