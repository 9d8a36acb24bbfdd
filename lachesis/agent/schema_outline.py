"""Shorten the JSON schema of an answer, because it is sent to an agent in each conversation."""

from __future__ import annotations

from lachesis.base.json_text import Json

# Depth to which objects are outlined; below it, a value has only its type.
MAX_DEPTH = 2


def outline_schema(schema: Json) -> Json:
    """Return a shorter JSON schema of the same answers.

    It keeps the keys of the answer with their descriptions, and the keys of nested objects with
    their types. Every answer that is valid under `schema` is valid under the outline. The full
    schema is in `/openapi.json` of `lachesis api`.

    Args:
        schema: A JSON schema as pydantic makes it, with its models under `$defs`.
    """
    return _outline(schema, schema.get("$defs", {}), 0)


def _outline(schema: Json, models: dict[str, Json], depth: int) -> Json:
    if "$ref" in schema:
        model_name = schema["$ref"].rsplit("/", 1)[-1]
        return _outline(models[model_name], models, depth)
    if "anyOf" in schema:
        return _outline_choice(schema, models, depth)
    outlined: Json = {"type": schema["type"]} if "type" in schema else {}
    if depth < MAX_DEPTH and "items" in schema:
        outlined["items"] = _outline(schema["items"], models, depth)
    if depth < MAX_DEPTH and "properties" in schema:
        outlined["properties"] = {
            name: _outline_key(property_schema, models, depth)
            for name, property_schema in schema["properties"].items()
        }
    if depth == 0 and "required" in schema:
        outlined["required"] = schema["required"]
    return outlined


def _outline_key(schema: Json, models: dict[str, Json], depth: int) -> Json:
    outlined = _outline(schema, models, depth + 1)
    if depth == 0 and "description" in schema:
        return {**outlined, "description": schema["description"]}
    return outlined


def _outline_choice(schema: Json, models: dict[str, Json], depth: int) -> Json:
    choices = [_outline(option, models, depth) for option in schema["anyOf"]]
    if all(set(choice) == {"type"} for choice in choices):
        return {"type": [choice["type"] for choice in choices]}
    return {"anyOf": choices}
