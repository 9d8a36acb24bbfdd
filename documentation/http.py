"""Describe the routes of `lachesis api`, from its OpenAPI schema."""

from __future__ import annotations

from typing import Any

from documentation.markdown import make_table
from lachesis.agent.rest import ERRORS, create_routes

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
    statuses = [(status, error["description"]) for status, error in ERRORS.items()]
    parts += ["## Status codes of errors", "", make_table(("status", "meaning"), statuses), ""]
    return "\n".join(parts)


def _describe(operation: dict[str, Any]) -> str:
    """Return the summary, with a link to the tool that it names."""
    title, _, tool = operation["summary"].partition(" (")
    tool = tool.removesuffix(")")
    return f"{title}: [`{tool}`](tools.md#{tool})" if tool else title
