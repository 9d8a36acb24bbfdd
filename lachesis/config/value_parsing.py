"""Convert typed text to the type that the schema of its field declares.

Text from the command line and text from an agent follow the same rule: the schema decides what the
text means. A string field keeps its text unchanged. The result still has to be validated.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from lachesis.base.errors import ConfigError, shorten
from lachesis.base.json_text import Json

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULLS = ("null", "none")
_TYPE_ORDER = {
    name: rank
    for rank, name in enumerate(("null", "boolean", "integer", "number", "array", "object"))
}
# Returned instead of a value when a text does not have the type that was tried.
NOT_PARSED = object()


class _Unquoted(str):
    """Hold a YAML scalar without quotation marks; the schema decides its type."""


class _TextLoader(yaml.SafeLoader):
    """Load YAML with every scalar left as text."""


def _construct_text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    text = str(node.value)
    if node.style is None:
        return _Unquoted(text)
    return text


_TextLoader.yaml_implicit_resolvers = {}
_TextLoader.add_constructor("tag:yaml.org,2002:str", _construct_text)


def read_typed_value(
    schema: Json, value: object, definitions: Mapping[str, Json], *, quoted: bool = False
) -> Any:
    """Convert each text in `value` to the type that `schema` declares for it.

    Args:
        schema: The JSON schema of the field.
        value: A text as it was typed, or a JSON value that may contain texts.
        definitions: The schemas that `$ref` refers to, by name.
        quoted: Whether a text stays a text where the schema declares no type.

    Returns:
        The value with its texts converted. A text that does not have the declared type is left
            unchanged, so that validation refuses it.
    """
    alternatives = _list_alternatives(schema, definitions)
    if not isinstance(value, str):
        return _read_items(alternatives, value, definitions)
    for alternative in alternatives:
        if quoted and _is_untyped(alternative):
            result = value
        else:
            result = _read_text(alternative, value, definitions)
        if result is not NOT_PARSED:
            return result
    return value


def read_untyped(text: str) -> Any:
    """Convert a string of unknown type: JSON, a number or flow-style YAML, else unchanged."""
    content = _read_json(text)
    if content is not NOT_PARSED:
        return content
    if _NUMBER.fullmatch(text):
        return float(text)
    if text.lstrip()[:1] in ("[", "{"):
        return _read_structure({}, text, (list, dict), {}, otherwise=text)
    return text


def _read_json(text: str) -> Any:
    """Parse JSON without Python's extensions NaN and Infinity, or return NOT_PARSED."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return NOT_PARSED


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _list_alternatives(schema: Json, definitions: Mapping[str, Json]) -> list[Json]:
    """Return the alternatives of a schema, null first, and string, which takes all, last."""
    reference = schema.get("$ref")
    if reference is not None:
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        return _list_alternatives(
            {**definitions.get(str(reference).rsplit("/", 1)[-1], {}), **siblings}, definitions
        )
    if len(schema.get("allOf", ())) == 1:
        return _list_alternatives(schema["allOf"][0], definitions)
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        expanded = [
            option
            for alternative in alternatives
            for option in _list_alternatives(alternative, definitions)
        ]
    elif isinstance(schema.get("type"), list):
        expanded = [{**schema, "type": name} for name in schema["type"]]
    else:
        expanded = [schema]
    return sorted(
        expanded, key=lambda option: _TYPE_ORDER.get(str(option.get("type")), len(_TYPE_ORDER))
    )


def _is_untyped(schema: Json) -> bool:
    return not schema.keys() & {"type", "enum", "const"}


def _read_text(schema: Json, text: str, definitions: Mapping[str, Json]) -> Any:
    """Convert a string to one alternative of a schema, or return NOT_PARSED."""
    if "enum" in schema or "const" in schema:
        return _read_member(schema.get("enum", [schema.get("const")]), text)
    match schema.get("type"):
        case "string":
            return text
        case "null":
            if text.lower() in _NULLS:
                return None
            return NOT_PARSED
        case "boolean":
            return _BOOLEANS.get(text.lower(), NOT_PARSED)
        case "integer":
            return _read_integer(text)
        case "number":
            return _read_number(text)
        case "array":
            return _read_structure(schema, text, (list,), definitions, otherwise=NOT_PARSED)
        case "object":
            return _read_structure(schema, text, (dict,), definitions, otherwise=NOT_PARSED)
    return read_untyped(text)


def _read_member(members: list[Any], text: str) -> Any:
    """Return the enumeration member that a string names; string members are tried first."""
    if text in members:
        return text
    member_by_json = {
        json.dumps(member): member for member in members if not isinstance(member, str)
    }
    return member_by_json.get(text.lower(), NOT_PARSED)


def _read_integer(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        number = _read_number(text)
    if number is not NOT_PARSED and number.is_integer():
        return int(number)
    return NOT_PARSED


def _read_number(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return NOT_PARSED
    if math.isfinite(number):
        return number
    return NOT_PARSED


def _read_structure(
    schema: Json,
    text: str,
    types: tuple[type, ...],
    definitions: Mapping[str, Json],
    *,
    otherwise: object,
) -> Any:
    """Parse a list or an object in JSON or YAML, and convert its items by the schema."""
    content = _read_json(text)
    if content is NOT_PARSED:
        try:
            content = yaml.load(text, Loader=_TextLoader)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):
            return otherwise
    if isinstance(content, types):
        return _read_items([schema], content, definitions)
    return otherwise


def _read_items(schemas: list[Json], value: object, definitions: Mapping[str, Json]) -> Any:
    """Convert the texts inside a list or an object; return any other value unchanged."""
    if isinstance(value, list):
        items: Json = next(
            (schema.get("items", {}) for schema in schemas if schema.get("type") == "array"), {}
        )
        return [_read_item(items, item, definitions) for item in value]
    if isinstance(value, dict):
        schema: Json = next((schema for schema in schemas if schema.get("type") == "object"), {})
        return {
            str(key): _read_item(_find_value_schema(schema, key), item, definitions)
            for key, item in value.items()
        }
    return value


def _read_item(schema: Json, item: object, definitions: Mapping[str, Json]) -> Any:
    unquoted = isinstance(item, _Unquoted)
    return read_typed_value(
        schema, str(item) if unquoted else item, definitions, quoted=not unquoted
    )


def _find_value_schema(schema: Json, key: str) -> Json:
    """Return the schema of the value under a key of an object."""
    additional = schema.get("additionalProperties")
    return schema.get("properties", {}).get(key) or (
        additional if isinstance(additional, dict) else {}
    )


def describe_allowed(schema: Json) -> str:
    """Return a field's type and limits in words."""
    limit_words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
        "minLength": "length at least",
        "pattern": "matching",
        "enum": "one of",
    }
    alternatives = []
    for alternative in schema.get("anyOf") or [schema]:
        words = [
            str(alternative.get("type") or alternative.get("$ref", "a value").rsplit("/", 1)[-1])
        ]
        words += [
            f"{text} {alternative[key]}" for key, text in limit_words.items() if key in alternative
        ]
        alternatives.append(", ".join(words))
    return " or ".join(alternatives)


def read_env_number(name: str, default: float, *, min_value: float) -> float:
    """Return the number in an environment variable, or the default when it is not set.

    Raises:
        ConfigError: The value is not a number, or is below `min_value`.
    """
    text = os.environ.get(name, "")
    try:
        value = float(text) if text.strip() else default
    except ValueError:
        value = math.nan
    if not value >= min_value:
        raise ConfigError(
            f"the environment variable {name} is {shorten(repr(text))}; allowed: a number, at "
            f"least {min_value:g}"
        )
    return value
