"""Make the forms of the deployments: the schema that Prefect's pages show and its server enforces.

A form differs from the signature of its flow: a parameter that may be left out is a plain empty
field, what exists on this machine is a list to choose from, and unknown names are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect.utilities.callables import ParameterSchema
from pydantic import BaseModel

from lachesis.base.json_text import Json
from lachesis.orchestration.choices import set_choices

LIMIT_KEYWORDS = ("minimum", "exclusiveMinimum", "maximum")


class FormSchema(ParameterSchema):
    """Add the keyword that lets the server refuse a parameter of another name."""

    additionalProperties: bool = False


def make_form(
    schema: ParameterSchema,
    choices: Mapping[str, list[str]],
    *,
    model: type[BaseModel] | None = None,
    required: tuple[str, ...] = (),
) -> FormSchema:
    """Return the form of a flow.

    Args:
        schema: What Prefect has read from the flow's signature and docstring.
        choices: The values that are allowed for a parameter, or for the items of one that is a
            list.
        model: What the flow checks its parameters with; the form has the same limits.
        required: The parameters that have to be filled in.
    """
    content: dict[str, Any] = schema.model_dump()
    checked_fields = model.model_json_schema()["properties"] if model else {}
    for name, field in content["properties"].items():
        _simplify_field(field)
        field.update(_read_limits(checked_fields.get(name, {})))
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
