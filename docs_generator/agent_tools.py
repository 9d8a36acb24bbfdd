"""Describe the tools for agents and the HTTP routes, from their tables."""

import json
from typing import Any

from docs_generator.markdown import make_table
from lachesis.agent_tools.answers import ANSWER_KEYS
from lachesis.agent_tools.http_routes import STATUS_MEANINGS, create_routes
from lachesis.agent_tools.tools import TOOLS, AgentTool

TOOLS_HEAD = """# Tools for agents

For whoever calls the `rl_*` tools, or writes a program that does: what each takes and answers.

Every answer is a JSON object. An error is `{"error": …, "code": …}` with further keys such as
`available`; the code is stable (see [errors](errors.md)).

A tool marked *reads only* changes nothing. One marked *idempotent* can be called again without
further effect. On a profile that may cost money, `rl_start_training` answers with a preview first:
`confirm` with the fingerprint of the preview agrees to exactly what was shown, once.

| tool | what it does |
|---|---|
"""


def render_tools() -> str:
    """Return the reference page as Markdown."""
    rows = [
        f"| [`{tool.name}`](#{tool.name}) | {_extract_first_sentence(tool)} |"
        for tool in TOOLS.values()
    ]
    return TOOLS_HEAD + "\n".join(rows) + "\n\n" + "\n".join(map(_render_section, TOOLS.values()))


def _render_section(tool: AgentTool) -> str:
    hints = tool.hints
    marks = [
        "reads only" if hints.read_only else "changes state",
        *(["destructive"] if hints.destructive else []),
        *(["idempotent"] if hints.idempotent else []),
        *(["reaches the network or other processes"] if hints.open_world else []),
    ]
    lines = [f"## {tool.name}", "", tool.description, "", f"*{', '.join(marks)}*", ""]
    arguments = tool.input_schema.get("properties", {})
    required = tool.input_schema.get("required", [])
    if arguments:
        lines += ["| argument | type | default | what it is |", "|---|---|---|---|"]
        lines += [
            _render_argument(name, schema, name in required) for name, schema in arguments.items()
        ]
    else:
        lines += ["No arguments."]
    keys = [
        f"`{key.rstrip('?')}`{'?' * key.endswith('?')}" for key in ANSWER_KEYS[tool.name].split()
    ]
    return "\n".join([*lines, "", f"Answer: {', '.join(keys)}.", "", ""])


def _render_argument(name: str, schema: dict[str, Any], is_required: bool) -> str:
    if is_required:
        default = "required"
    else:
        default = f"`{json.dumps(schema.get('default'))}`"
    limits = [
        f"{phrase} {variant[key]}"
        for variant in schema.get("anyOf", [schema])
        for key, phrase in (
            ("minimum", "at least"),
            ("maximum", "at most"),
            ("minLength", "length at least"),
            ("maxLength", "length at most"),
            ("minItems", "items at least"),
            ("maxItems", "items at most"),
        )
        if key in variant
    ]
    text = schema.get("description", "") + (f" ({', '.join(limits)})" if limits else "")
    return f"| `{name}` | {_format_type(schema)} | {default} | {text} |"


def _format_type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_format_type, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"array of {_format_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _extract_first_sentence(tool: AgentTool) -> str:
    return " ".join(tool.description.split("\n\n")[0].split())


HTTP_HEAD = """# HTTP

For whoever calls Lachesis from a program that is not written in Python: the routes of
`lachesis api`.

`lachesis api` listens on loopback and asks for the token of this home as a bearer token; its page
at `/docs` shows the bodies and answers of each route and needs no network, and `/openapi.json` is
the schema. A route does what the [tool](tools.md) in its line does. The header `X-Lachesis-Session`
names the state of a client (its environment and its draft of a configuration), so that several
clients do not disturb each other.
"""


def render_http() -> str:
    """Return the page of all routes, a table per tag, and of the status codes."""
    rows_by_tag: dict[str, list[tuple[str, str]]] = {}
    for path, operations in create_routes().openapi()["paths"].items():
        for method, operation in operations.items():
            rows = rows_by_tag.setdefault(operation.get("tags", ["service"])[0], [])
            rows.append((f"`{method.upper()} {path}`", _describe(operation)))
    parts = [HTTP_HEAD]
    for tag, rows in rows_by_tag.items():
        parts += [f"## {tag.capitalize()}", "", make_table(("route", "what it does"), rows), ""]
    statuses = [(str(status), text) for status, text in STATUS_MEANINGS.items()]
    parts += ["## Status codes of errors", "", make_table(("status", "meaning"), statuses), ""]
    return "\n".join(parts)


def _describe(operation: dict[str, Any]) -> str:
    """Return the summary, with a link to the tool that it names."""
    title, _, tool = operation["summary"].partition(" (")
    tool = tool.removesuffix(")")
    return f"{title}: [`{tool}`](tools.md#{tool})" if tool else title
