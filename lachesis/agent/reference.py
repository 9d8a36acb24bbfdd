"""The tool reference, made from the table: `python -m lachesis.agent.reference > docs/tools.md`."""

from __future__ import annotations

import json
from typing import Any

from lachesis.agent.tools import TABLE, Tool

HEAD = """# The tools

Made from the code by `python -m lachesis.agent.reference`; a test compares. Every answer is a JSON object. An error is
`{"error": …, "code": …}` with further keys such as `available`; its code is stable (see `lachesis/base/errors.py`).

A tool that only reads changes nothing. An idempotent one may be called again without further effect. Over MCP, tools marked
*confirm* take `confirm` (boolean): on a profile that may cost money nothing happens without `confirm=true`, and the answer is
a preview.

| tool | what it does |
|---|---|
"""


def reference() -> str:
    """The whole page."""
    rows = [f"| [`{tool.name}`](#{tool.name}) | {_first_sentence(tool)} |" for tool in TABLE.values()]
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(map(_section, TABLE.values()))


def _section(tool: Tool) -> str:
    hints = tool.hints
    marks = [
        "reads only" if hints.read_only else "changes state",
        *(["destructive"] if hints.destructive else []),
        *(["idempotent"] if hints.idempotent else []),
        *(["reaches the network or other processes"] if hints.open_world else []),
        *(["confirm"] if tool.preview else []),
    ]
    lines = [f"## {tool.name}", "", tool.description, "", f"*{', '.join(marks)}*", ""]
    arguments = tool.input_schema.get("properties", {})
    required = tool.input_schema.get("required", [])
    if arguments:
        lines += ["| argument | type | default | what it is |", "|---|---|---|---|"]
        lines += [_argument(name, one, name in required) for name, one in arguments.items()]
    else:
        lines += ["No arguments."]
    answer = tool.output_schema
    needed = answer.get("required", [])
    keys = [f"`{name}`{'' if name in needed else '?'}" for name in answer.get("properties", {})]
    return "\n".join([*lines, "", f"Answer: {', '.join(keys)}.", "", ""])


def _argument(name: str, schema: dict[str, Any], required: bool) -> str:
    default = "required" if required else f"`{json.dumps(schema.get('default'))}`"
    limits = [
        f"{word} {one[key]}"
        for one in schema.get("anyOf", [schema])
        for key, word in (
            ("minimum", "at least"),
            ("maximum", "at most"),
            ("minLength", "length at least"),
            ("maxLength", "length at most"),
            ("minItems", "items at least"),
            ("maxItems", "items at most"),
        )
        if key in one
    ]
    text = schema.get("description", "") + (f" ({', '.join(limits)})" if limits else "")
    return f"| `{name}` | {_type(schema)} | {default} | {text} |"


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _first_sentence(tool: Tool) -> str:
    return " ".join(tool.description.split("\n\n")[0].split())


if __name__ == "__main__":
    print(reference(), end="")
