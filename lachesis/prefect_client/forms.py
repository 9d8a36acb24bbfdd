"""Make the forms of the deployments: the schema that Prefect's pages show and its server enforces.

A form differs from the signature of its flow: a parameter that may be left out is a plain empty
field, what exists on this machine is a list to choose from, and unknown names are refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.utilities.callables import ParameterSchema
from pydantic import BaseModel

from lachesis.base.json_text import Json
from lachesis.environment_catalog.scan import scan_environments
from lachesis.prefect_client.background_serve import (
    NIGHTLY_FLOW,
    TEST_FLOW,
    TRAINING_FLOW,
    get_deployment_name,
)
from lachesis.prefect_client.resources import PrefectApi

# Describes the parameters of a flow that its spec does not have.
RESERVED = "Reserved for programs; leave it empty."
LIMIT_KEYWORDS = ("minimum", "exclusiveMinimum", "maximum")


class FormSchema(ParameterSchema):
    """Add the keyword that lets the server refuse a parameter of another name."""

    additionalProperties: bool = False


def make_form(
    schema: ParameterSchema,
    choices: Mapping[str, list[str]],
    *,
    spec: type[BaseModel] | None = None,
    required: tuple[str, ...] = (),
) -> FormSchema:
    """Return the form of a flow.

    Args:
        schema: What Prefect has read from the flow's signature and docstring.
        choices: The values that are allowed for a parameter, or for the items of one that is a
            list.
        spec: What the flow's parameters are read into; the form has the same descriptions and
            limits.
        required: The parameters that have to be filled in.
    """
    content: dict[str, Any] = schema.model_dump()
    spec_fields = spec.model_json_schema()["properties"] if spec else {}
    for name, field in content["properties"].items():
        _simplify_field(field)
        spec_field = spec_fields.get(name, {"description": RESERVED})
        field.update(_read_limits(spec_field))
        if spec:
            field["description"] = spec_field.get("description", "")
        set_choices(field, choices.get(name, []))
    for definition in content["definitions"].values():
        for field in definition.get("properties", {}).values():
            _simplify_field(field)
    for name in required:
        content["properties"][name].pop("default", None)
    content["required"] = list(required)
    # Given explicitly, because Prefect registers only what was set.
    return FormSchema(**content, additionalProperties=False)


def _read_limits(checked_field: Json) -> Json:
    """Return the limits of a checked field that Prefect's server explains well."""
    for kind in checked_field.get("anyOf", [checked_field]):
        if kind.get("type") in ("integer", "number"):
            return {name: kind[name] for name in LIMIT_KEYWORDS if name in kind}
    return {}


def _simplify_field(field: Json) -> None:
    """Show a field of `X | None` as a field of X, which is empty by default."""
    kinds = [kind for kind in field.get("anyOf", ()) if kind.get("type") != "null"]
    if len(kinds) == 1:
        del field["anyOf"]
        field.update(kinds[0])
        if field.get("default", 0) is None:
            del field["default"]
    if "title" in field:
        title = field["title"].replace("_", " ")
        field["title"] = title[:1].upper() + title[1:]


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
