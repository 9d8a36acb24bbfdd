"""Serve the tools as an MCP server, over stdio or streamable HTTP."""

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

import anyio.from_thread
import anyio.to_thread
from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from lachesis import __version__
from lachesis.agent_tools.health_check import find_skill
from lachesis.agent_tools.session import AgentSession
from lachesis.agent_tools.tools import SLOW_TOOLS, TOOLS, AgentTool, CallContext
from lachesis.base.errors import LachesisError
from lachesis.base.http_guard import ASGIApp, HttpGuard
from lachesis.base.json_text import Json, error_to_payload, to_compact_json

Context = ServerRequestContext[Any, Any]
SESSION_HEADER = "x-lachesis-session"
SKILL_URI = "lachesis://skill"
# Maximum number of calls that wait for an inference test at once, while other calls are answered.
MAX_WAITING_CALLS = 100
INSTRUCTIONS = (
    "Train language models by reinforcement: list environments, select one, edit the draft, test, "
    "start, check, get results. "
    "A start returns at once and training continues by itself; do not poll. The resource "
    "lachesis://skill has exact calls."
)


def create_server(session_name: str) -> Server[Any]:
    """Return the MCP server that offers all tools.

    Args:
        session_name: The session of a client, unless its HTTP request names another one in the
            header X-Lachesis-Session.
    """
    handlers = _RequestHandlers(session_name)
    return Server(
        "lachesis",
        version=__version__,
        title="Lachesis",
        instructions=INSTRUCTIONS,
        on_list_tools=handlers.list_tools,
        on_call_tool=handlers.call_tool,
        on_list_resources=handlers.list_resources,
        on_read_resource=handlers.read_resource,
    )


class _RequestHandlers:
    """Answer the requests of MCP clients."""

    def __init__(self, session_name: str) -> None:
        self.session_name = session_name
        self.wait_limiter = anyio.CapacityLimiter(MAX_WAITING_CALLS)

    def open_session(self, context: Context) -> AgentSession:
        if context.request is not None:
            headers = context.request.headers
        else:
            headers = {}
        return AgentSession(headers.get(SESSION_HEADER) or self.session_name)

    async def list_tools(self, context: Context, params: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_describe_tool(tool) for tool in TOOLS.values()])

    async def call_tool(
        self, context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        """Run a tool in a thread and return its answer; it reports its progress to the client."""
        tool = TOOLS.get(params.name)
        if tool is None:
            raise MCPError(
                types.INVALID_PARAMS,
                f"there is no tool {params.name[:100]!r}; there are: {', '.join(TOOLS)}",
            )

        def report_progress(done: float, total: float, text: str) -> None:
            anyio.from_thread.check_cancelled()
            anyio.from_thread.run(context.session.report_progress, done, total, text)

        def run_tool() -> types.CallToolResult:
            try:
                call_context = CallContext(self.open_session(context), report_progress)
            except LachesisError as error:
                return _make_result(error_to_payload(error), error)
            return _make_result(*tool.run_safely(call_context, params.arguments))

        # A call that waits for a test takes a thread for up to half a minute. With a limiter of
        # their own such calls leave the default threads to all others.
        return await anyio.to_thread.run_sync(
            run_tool, limiter=self.wait_limiter if tool.name in SLOW_TOOLS else None
        )

    async def list_resources(self, context: Context, params: object) -> types.ListResourcesResult:
        """Return the list of resources: the skill, if this installation has it."""
        skill = types.Resource(
            uri=SKILL_URI,
            name="skill",
            description="When to use which tool, exact calls, and what to do when a run has a "
            "problem",
            mime_type="text/markdown",
        )
        return types.ListResourcesResult(resources=[skill] if find_skill() else [])

    async def read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        """Return the text of the skill; any other address is refused."""
        skill = find_skill()
        if params.uri != SKILL_URI or skill is None:
            raise MCPError(
                types.INVALID_PARAMS,
                f"there is no resource {params.uri[:200]!r}; allowed: {SKILL_URI}",
                {"uri": params.uri},
            )
        text = await anyio.to_thread.run_sync(lambda: skill.read_text(encoding="utf-8"))
        contents = types.TextResourceContents(uri=SKILL_URI, mime_type="text/markdown", text=text)
        return types.ReadResourceResult(contents=[contents])


@functools.cache
def _describe_tool(tool: AgentTool) -> types.Tool:
    """Return a tool as the protocol describes it: name, title, schema of arguments and hints."""
    hints = tool.hints
    return types.Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.input_schema,
        annotations=types.ToolAnnotations(
            title=tool.title,
            read_only_hint=hints.read_only,
            destructive_hint=hints.destructive,
            idempotent_hint=hints.idempotent,
            open_world_hint=hints.open_world,
        ),
    )


def _make_result(answer: Json, error: LachesisError | None) -> types.CallToolResult:
    content: list[Any] = [types.TextContent(type="text", text=to_compact_json(answer))]
    if error is not None:
        return types.CallToolResult(content=content, is_error=True)
    return types.CallToolResult(content=content, structured_content=answer)


def serve_stdio(session_name: str) -> None:
    """Serve until stdin is closed or a signal ends the process, which loses no state."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    anyio.run(_run_stdio_server, session_name)


async def _run_stdio_server(session_name: str) -> None:
    from mcp.server.stdio import stdio_server

    server = create_server(session_name)
    async with stdio_server() as (read, write):
        # anything printed to stdout would corrupt the message stream
        with contextlib.redirect_stdout(sys.stderr):
            await server.run(read, write, server.create_initialization_options())


def create_app(
    session_name: str, *, host: str, token: str, allowed_hosts: Iterable[str] = ()
) -> ASGIApp:
    """Return the ASGI application that serves MCP at /mcp."""
    from mcp.server.transport_security import TransportSecuritySettings

    app = create_server(session_name).streamable_http_app(
        streamable_http_path="/mcp",
        stateless_http=True,
        json_response=False,  # JSON responses cannot carry progress notifications
        # HttpGuard checks the Host header
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return HttpGuard(app, host=host, token=token, allowed_hosts=allowed_hosts)
