"""Serve the tools as plain HTTP routes, one for each row of `ROUTES`.

Success is status 200 with JSON; any other status has a JSON body with `error` and `code`. The
header X-Lachesis-Session names a session; clients without it share one. The limit on status reports
is left to the client here, so the service does not apply its own.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException

from lachesis import __version__
from lachesis.agent_tools.answer_size import shorten_answer
from lachesis.agent_tools.run_reports import report_live_status
from lachesis.agent_tools.session import AgentSession
from lachesis.agent_tools.tools import SLOW_TOOLS, TOOLS, CallContext, run_catching_errors
from lachesis.base.errors import ArgumentsError, LachesisError
from lachesis.base.http_guard import ASGIApp, HttpGuard
from lachesis.base.json_text import Json, error_to_payload


@dataclass(frozen=True)
class ToolRoute:
    """Say which tool answers at an address.

    The parts of the path, the query of a GET and the JSON body of a POST are its arguments.
    """

    method: str
    path: str
    tool: str
    tag: str
    answer: Callable[[CallContext, Json], Any] | None = None
    """Answers in place of the tool, where the contract of the routes differs from that of the
    tools.
    """

    def list_path_names(self) -> list[str]:
        """Return the names of the arguments in the path."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]


def _list_environments(context: CallContext, arguments: Json) -> Any:
    return TOOLS["rl_list_environments"].run(context, arguments)["environments"]


def _check_status(context: CallContext, arguments: Json) -> Any:
    return shorten_answer(report_live_status(context.session, arguments["run_id"]))


ROUTES = (
    ToolRoute("GET", "/health", "rl_health_check", "service"),
    ToolRoute("GET", "/environments", "rl_list_environments", "environments", _list_environments),
    ToolRoute("POST", "/environments/{name}/select", "rl_select_environment", "environments"),
    ToolRoute("POST", "/environments/check", "rl_check_environment", "environments"),
    ToolRoute("GET", "/models", "rl_list_models", "environments"),
    ToolRoute("GET", "/config", "rl_get_current_config", "configuration"),
    ToolRoute("POST", "/config", "rl_edit_config", "configuration"),
    ToolRoute("GET", "/runs", "rl_list_runs", "runs"),
    ToolRoute("POST", "/runs", "rl_start_training", "runs"),
    ToolRoute("GET", "/runs/{run_id}", "rl_check_status", "runs", _check_status),
    ToolRoute("POST", "/runs/{run_id}/stop", "rl_stop_training", "runs"),
    ToolRoute("GET", "/runs/{run_id}/metrics", "rl_get_results", "runs"),
    ToolRoute("GET", "/runs/{run_id}/rollouts", "rl_get_rollouts", "runs"),
    ToolRoute("POST", "/test/inference", "rl_test_inference", "inference test"),
)
STATUS_MEANINGS = {
    400: "a configuration that cannot work",
    401: "no bearer token, where one is needed",
    402: "the Tinker account is not paid",
    403: "a locked field or the owner's policy, or a Host or Origin that is not allowed",
    404: "no such environment, field, model or run",
    409: "not possible in this state, an environment that cannot be imported, or a key is missing",
    411: "a body without its length",
    413: "a body beyond a megabyte",
    422: "arguments of the wrong form",
    502: "a server that does not speak the protocol",
    503: "the Prefect server does not answer",
    504: "an environment whose import does not end",
    507: "the disk refused",
}
ERROR_SCHEMA = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "code": {"type": "string"}},
    "required": ["error", "code"],
}
# Paths that describe the routes and reveal nothing else. They need no token, because a browser
# cannot send one before it has loaded the page.
PUBLIC_PATHS = ("/", "/docs", "/openapi.json", "/static-offline-docs/")
# Maximum number of calls that wait for an inference test at once. They run in threads of their own,
# so that other calls are answered meanwhile.
MAX_WAITING_CALLS = 100


def create_app(
    *, host: str = "127.0.0.1", token: str | None = None, allowed_hosts: Iterable[str] = ()
) -> ASGIApp:
    """Return the ASGI application that serves the tools over HTTP and MCP, with its guard."""
    return HttpGuard(
        create_routes(),
        host=host,
        token=token,
        allowed_hosts=allowed_hosts,
        open_paths=PUBLIC_PATHS,
    )


def create_routes() -> FastAPI:
    """Return the routes without their guard; the page at /docs loads from no other host."""
    app: FastAPI = FastAPIOffline(
        title="Lachesis",
        version=__version__,
        description=__doc__,
        # shows the token field on the page; HttpGuard has already checked the token
        dependencies=[Security(HTTPBearer(auto_error=False))],
    )
    app.add_exception_handler(HTTPException, _answer_http_error)
    entrance = {"name": "lachesis", "version": __version__, "docs": "/docs", "health": "/health"}
    app.add_api_route(
        "/",
        lambda: entrance,
        summary="What answers here, and where its documentation is",
        tags=["service"],
        operation_id="entrance",
    )
    limiter = anyio.CapacityLimiter(MAX_WAITING_CALLS)
    for route in ROUTES:
        tool = TOOLS[route.tool]
        app.add_api_route(
            route.path,
            _make_endpoint(route, limiter if route.tool in SLOW_TOOLS else None),
            methods=[route.method],
            summary=f"{tool.title} ({tool.name})",
            description=tool.description,
            tags=[route.tag],
            operation_id=tool.name,
            openapi_extra=_describe_route(route),
        )
    return app


def _make_endpoint(
    route: ToolRoute, limiter: anyio.CapacityLimiter | None
) -> Callable[[Request], Any]:
    """Return the function that answers at a route; the tool runs in a thread."""
    answer = route.answer or TOOLS[route.tool].run

    async def endpoint(request: Request) -> JSONResponse:
        """Call the tool in a thread with the request's arguments and session, and answer."""
        try:
            arguments = await _read_arguments(request)
            session = AgentSession(
                request.headers.get("x-lachesis-session")
                or os.environ.get("LACHESIS_SESSION")
                or "http"
            )
        except LachesisError as error:
            return make_error_response(error)
        body, failure = await anyio.to_thread.run_sync(
            lambda: run_catching_errors(lambda: answer(CallContext(session), arguments)),
            limiter=limiter,
        )
        if failure is not None:
            return make_error_response(failure)
        return JSONResponse(body)

    return endpoint


async def _read_arguments(request: Request) -> Json:
    """Return the arguments of a request.

    Raises:
        ArgumentsError: The body is no JSON object, or names an argument of the path again.
    """
    if request.method == "GET":
        return {**request.query_params, **request.path_params}
    content = await request.body()
    if not content:
        return dict(request.path_params)
    if "json" not in request.headers.get("content-type", ""):
        raise ArgumentsError("the body is not JSON; send Content-Type: application/json")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArgumentsError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ArgumentsError("the body is not a JSON object")
    if named_twice := sorted(set(body) & set(request.path_params)):
        raise ArgumentsError(f"the address gives {', '.join(named_twice)} already")
    return {**body, **request.path_params}


def _describe_route(route: ToolRoute) -> Json:
    """Return the arguments and answers of a route for OpenAPI."""
    schema = TOOLS[route.tool].input_schema
    properties, required = schema["properties"], schema.get("required", [])
    path_names = route.list_path_names()
    others = {name: value for name, value in properties.items() if name not in path_names}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": properties[name]}
        for name in path_names
    ]
    parameters.append(
        {
            "name": "X-Lachesis-Session",
            "in": "header",
            "description": "The name of this client's state",
            "schema": {"type": "string"},
        }
    )
    described: Json = {"parameters": parameters, "responses": _describe_answers(route)}
    if route.method == "GET":
        parameters += [
            {"name": name, "in": "query", "schema": value} for name, value in others.items()
        ]
    elif others:
        needed = [name for name in required if name in others]
        body = {**schema, "properties": others, "required": needed}
        described["requestBody"] = {
            "required": bool(needed),
            "content": {"application/json": {"schema": body}},
        }
    return described


def _describe_answers(route: ToolRoute) -> Json:
    """Return the responses of a route for the OpenAPI schema: its success and its errors."""
    kind = "array" if route.answer is _list_environments else "object"
    errors = {
        str(status): {
            "description": text,
            "content": {"application/json": {"schema": ERROR_SCHEMA}},
        }
        for status, text in STATUS_MEANINGS.items()
    }
    success = {
        "description": "The answer of the tool",
        "content": {"application/json": {"schema": {"type": kind}}},
    }
    return {"200": success, **errors}


async def _answer_http_error(request: Request, error: Any) -> JSONResponse:
    return JSONResponse(
        {"error": str(error.detail), "code": f"http_{error.status_code}"},
        error.status_code,
        error.headers,
    )


def make_error_response(error: LachesisError) -> JSONResponse:
    """Return the response for an error, with the status code of its class."""
    return JSONResponse(error_to_payload(error), error.http_status)
