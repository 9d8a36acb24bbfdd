"""Say what is allowed for a parameter of a flow that the Prefect server refuses."""

from __future__ import annotations

from typing import Any

import jsonschema

from lachesis.base.errors import shorten
from lachesis.config.edits import describe_allowed


def describe_refused_value(error: jsonschema.ValidationError) -> str:
    """Return the reason of a refusal, with what is allowed."""
    schema: Any = error.schema
    properties = schema.get("properties", {})
    if error.validator == "required":
        values: Any = error.instance
        missing = [name for name in schema["required"] if name not in values]
        allowed = [f"{name}: {describe_allowed(properties[name])}" for name in missing]
        return f"{error.message}; allowed for {'; '.join(allowed)}"
    if error.validator == "additionalProperties":
        return f"{error.message}; allowed: {', '.join(properties)}"
    if error.validator == "enum":
        return error.message
    # The server lets each optional value be null, which nobody needs to know.
    kinds = [kind for kind in schema.get("anyOf", []) if kind.get("type") != "null"]
    if len(kinds) == 1:
        schema = {**{name: value for name, value in schema.items() if name != "anyOf"}, **kinds[0]}
    return f"it is {shorten(repr(error.instance))}; allowed: {describe_allowed(schema)}"
