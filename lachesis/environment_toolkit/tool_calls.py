"""Describe tools in a prompt, and parse the calls of an answer.

The format is that of Hermes and Qwen models:

    <tool_call>{"name": "guess", "arguments": {"number": 7}}</tool_call>
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

TOOL_CALL_PATTERN = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class MalformedCall(Exception):
    """The answer contains a call that cannot be parsed; the message tells the model the mistake."""


@dataclass(frozen=True)
class ToolDefinition:
    """Describe a tool; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the definition in the format of chat completion APIs."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """Hold one call of a tool."""

    name: str
    arguments: dict[str, Any]


def describe_tools(tools: Sequence[ToolDefinition]) -> str:
    """Return the tools as text for a system prompt."""
    listed = "\n".join(json.dumps(tool.as_json()) for tool in tools)
    return (
        "You can call these tools:\n<tools>\n"
        f"{listed}\n</tools>\n"
        'Call one by answering <tool_call>{"name": NAME, "arguments": {…}}</tool_call> and nothing '
        "else."
    )


def parse_tool_calls(answer: str, tools: Sequence[ToolDefinition]) -> list[ToolCall]:
    """Return the calls in an answer, in order.

    Raises:
        MalformedCall: A call is not JSON, names an unknown tool, or has arguments that do not fit.
    """
    texts = TOOL_CALL_PATTERN.findall(answer)
    if not texts and ("<tool_call>" in answer or "</tool_call>" in answer):
        raise MalformedCall("a tool call needs both <tool_call> and </tool_call>")
    return [_parse_tool_call(text, {tool.name: tool for tool in tools}) for text in texts]


def _parse_tool_call(text: str, tools: Mapping[str, ToolDefinition]) -> ToolCall:
    """Return a tool call of a text; raise MalformedCall with its fault."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"a tool call is not JSON: {error}") from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        raise MalformedCall("a tool call must be an object with `name` and `arguments`")
    tool = tools.get(parsed["name"])
    if tool is None:
        raise MalformedCall(
            f"there is no tool {parsed['name'][:40]!r}; available: {', '.join(tools)}"
        )
    arguments = parsed.get("arguments", {})
    problem = next(
        iter(
            jsonschema.Draft202012Validator({"type": "object", **tool.parameters}).iter_errors(
                arguments
            )
        ),
        None,
    )
    if problem is not None:
        raise MalformedCall(f"the arguments of {tool.name} are wrong: {problem.message[:200]}")
    return ToolCall(tool.name, arguments)
