"""Serve the tools as plain HTTP routes.

Success is status 200 with JSON; any other status has a JSON body with `error` and `code`. The
header X-Lachesis-Session names a session; clients without it share one. The limit on status reports
is left to the client here, so the service does not apply its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import Body, Depends, FastAPI, Header, Path, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from lachesis import __version__
from lachesis.agent_tools import schemas
from lachesis.agent_tools.draft import AgentSession
from lachesis.agent_tools.run_reports import RolloutList
from lachesis.agent_tools.tool_arguments import (
    RolloutItem,
    RolloutOrder,
    RolloutStep,
    SelectedProfile,
)
from lachesis.agent_tools.tools import TOOLS, CallContext, run_catching_errors
from lachesis.base.errors import (
    ArgumentsError,
    CheckpointError,
    ConfigError,
    EnvironmentTimeoutError,
    LachesisError,
    LockedFieldError,
    MissingDependencyError,
    MissingKeyError,
    ModelNotFoundError,
    PolicyError,
    RLEnvironmentError,
    RunError,
    ServerDownError,
    StorageError,
    UnknownEnvironmentError,
    UnknownFieldError,
    UnknownRunError,
    UnknownTestError,
)
from lachesis.base.http_guard import ASGIApp, HttpGuard
from lachesis.base.json_text import Json, ResponseModel, error_to_payload
from lachesis.operations.launches import ModelList
from lachesis.reporting.run_schemas import RunResults, RunStatus


class ErrorBody(ResponseModel):
    """The body of every status other than 200."""

    error: str
    code: str


class ServiceInfo(ResponseModel):
    """The answer at the root address, which needs no token."""

    name: str
    version: str
    docs: str
    """Path of the page that describes the routes."""
    health: str
    """Path of the health check, which needs the token if the server has one."""


class SelectBody(BaseModel):
    """Say where to train, and which model to use."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    profile: str | None = None
    model: str | None = None


ERRORS: dict[int | str, Json] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (
        (400, "a configuration that cannot work"),
        (401, "no bearer token, where one is needed"),
        (403, "a locked field or the owner's policy, or a Host or Origin that is not allowed"),
        (404, "no such environment, field, model or run"),
        (
            409,
            "not possible in this state, an environment that cannot be imported, or a key is "
            "missing",
        ),
        (411, "a body without its length"),
        (413, "a body beyond a megabyte"),
        (422, "arguments of the wrong form"),
        (503, "the Prefect server does not answer"),
        (504, "an environment whose import does not end"),
        (507, "the disk refused"),
    )
}


def _make_context(
    x_lachesis_session: Annotated[
        str | None, Header(description="The name of this client's state")
    ] = None,
) -> CallContext:
    return CallContext(
        AgentSession(x_lachesis_session or os.environ.get("LACHESIS_SESSION") or "http")
    )


RequestContext = Annotated[CallContext, Depends(_make_context)]
# Paths that describe the routes and reveal nothing else. They need no token, because a browser
# cannot send one before it has loaded the page.
PUBLIC_PATHS = ("/", "/docs", "/openapi.json", "/static-offline-docs/")
# Maximum number of calls that wait for an inference test at once. They run in threads of their own,
# so that other calls are answered meanwhile.
MAX_WAITING_CALLS = 100
EditBody = TOOLS["rl_edit_config"].arguments
StartBody = TOOLS["rl_start_training"].arguments
TestBody = TOOLS["rl_test_inference"].arguments
CheckBody = TOOLS["rl_check_environment"].arguments
RunId = Annotated[str, Path(description="Eight hexadecimal digits")]


def create_app(
    *, host: str = "127.0.0.1", token: str | None = None, allowed_hosts: Iterable[str] = ()
) -> ASGIApp:
    """Return the ASGI application."""
    return HttpGuard(
        create_routes(),
        host=host,
        token=token,
        allowed_hosts=allowed_hosts,
        open_paths=PUBLIC_PATHS,
    )


def create_routes() -> FastAPI:
    """Return the routes without the guard in front of them. The page at /docs loads nothing from
    other hosts.
    """
    app: FastAPI = FastAPIOffline(
        title="Lachesis",
        version=__version__,
        description=__doc__,
        responses=ERRORS,
        # shows the token field on the page; HttpGuard has already checked the token
        dependencies=[Security(HTTPBearer(auto_error=False))],
    )
    _add_error_handlers(app)
    _add_service_routes(app)
    _add_environment_routes(app)
    _add_run_routes(app)
    _add_test_routes(app)
    return app


def _describe_route(tool_name: str, tag: str) -> Json:
    registered_tool = TOOLS[tool_name]
    return {
        "summary": f"{registered_tool.title} ({tool_name})",
        "description": registered_tool.description,
        "tags": [tag],
    }


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(LachesisError)
    async def handle_lachesis_error(request: Request, error: LachesisError) -> JSONResponse:
        return make_error_response(error)

    @app.exception_handler(RequestValidationError)
    async def handle_invalid_request(
        request: Request, error: RequestValidationError
    ) -> JSONResponse:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        )
        is_json = "json" in request.headers.get("content-type", "json")
        hint = "" if is_json else "; send Content-Type: application/json"
        return make_error_response(ArgumentsError(f"the request is invalid: {problems}{hint}"))

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            {"error": str(error.detail), "code": f"http_{error.status_code}"},
            error.status_code,
            error.headers,
        )


def _add_service_routes(app: FastAPI) -> None:
    @app.get(
        "/",
        response_model=ServiceInfo,
        summary="What answers here, and where its documentation is",
        tags=["service"],
    )
    def entrance() -> ServiceInfo:
        return ServiceInfo(name="lachesis", version=__version__, docs="/docs", health="/health")

    @app.get(
        "/health",
        response_model=schemas.ServiceHealth,
        **_describe_route("rl_health_check", "service"),
    )
    def health(context: RequestContext) -> Any:
        return run_tool("rl_health_check", context)


def _add_environment_routes(app: FastAPI) -> None:
    """Add the routes that list and select environments, and those of the draft."""

    @app.get(
        "/environments",
        response_model=list[schemas.EnvironmentEntry],
        **_describe_route("rl_list_environments", "environments"),
    )
    def environments(context: RequestContext) -> Any:
        return respond(lambda: context.session.list_environments().to_payload()["environments"])

    @app.post(
        "/environments/{name}/select",
        response_model=schemas.SelectAnswer,
        **_describe_route("rl_select_environment", "environments"),
    )
    def select(
        context: RequestContext, name: str, body: Annotated[SelectBody | None, Body()] = None
    ) -> Any:
        arguments = _read_arguments(body) if body else {}
        return run_tool("rl_select_environment", context, {"name": name, **arguments})

    _add_draft_routes(app)


def _add_draft_routes(app: FastAPI) -> None:
    @app.get(
        "/models", response_model=ModelList, **_describe_route("rl_list_models", "environments")
    )
    def models(context: RequestContext, profile: SelectedProfile = None) -> Any:
        return run_tool("rl_list_models", context, {"profile": profile})

    @app.get(
        "/config",
        response_model=schemas.CurrentConfig,
        **_describe_route("rl_get_current_config", "configuration"),
    )
    def config(context: RequestContext) -> Any:
        return run_tool("rl_get_current_config", context)

    @app.post(
        "/config",
        response_model=schemas.EditAnswer,
        **_describe_route("rl_edit_config", "configuration"),
    )
    def edit(context: RequestContext, body: EditBody) -> Any:  # type: ignore[valid-type]
        return run_tool("rl_edit_config", context, _read_arguments(body))


def _add_run_routes(app: FastAPI) -> None:
    @app.get("/runs", response_model=schemas.RunList, **_describe_route("rl_list_runs", "runs"))
    def runs(context: RequestContext) -> Any:
        return run_tool("rl_list_runs", context)

    @app.post(
        "/runs", response_model=schemas.StartAnswer, **_describe_route("rl_start_training", "runs")
    )
    def start(
        context: RequestContext,
        body: Annotated[StartBody | None, Body()] = None,  # type: ignore[valid-type]
    ) -> Any:
        return run_tool("rl_start_training", context, _read_arguments(body) if body else {})

    @app.get(
        "/runs/{run_id}", response_model=RunStatus, **_describe_route("rl_check_status", "runs")
    )
    def status(context: RequestContext, run_id: RunId) -> Any:
        return respond(lambda: context.session.get_live_status(run_id).to_payload())

    @app.post(
        "/runs/{run_id}/stop",
        response_model=schemas.StopAnswer,
        **_describe_route("rl_stop_training", "runs"),
    )
    def stop(context: RequestContext, run_id: RunId) -> Any:
        return run_tool("rl_stop_training", context, {"run_id": run_id})

    @app.get(
        "/runs/{run_id}/metrics",
        response_model=RunResults,
        **_describe_route("rl_get_results", "runs"),
    )
    def metrics(context: RequestContext, run_id: RunId) -> Any:
        return run_tool("rl_get_results", context, {"run_id": run_id})

    @app.get(
        "/runs/{run_id}/rollouts",
        response_model=RolloutList,
        **_describe_route("rl_get_rollouts", "runs"),
    )
    def rollouts(
        context: RequestContext,
        run_id: RunId,
        step: RolloutStep = None,
        order: RolloutOrder = "worst",
        item: RolloutItem = None,
        limit: Annotated[int, Field(ge=1, le=100)] = 5,
    ) -> Any:
        query = {"step": step, "order": order, "item": item, "limit": limit}
        return run_tool("rl_get_rollouts", context, {"run_id": run_id, **query})


def _add_test_routes(app: FastAPI) -> None:
    """Add the routes whose calls wait for a result, in threads of their own."""
    wait_limiter = anyio.CapacityLimiter(MAX_WAITING_CALLS)

    @app.post(
        "/test/inference",
        response_model=schemas.TestReport,
        **_describe_route("rl_test_inference", "inference test"),
    )
    async def test_inference(
        context: RequestContext,
        body: Annotated[TestBody | None, Body()] = None,  # type: ignore[valid-type]
    ) -> Any:
        arguments = _read_arguments(body) if body else {}
        return await anyio.to_thread.run_sync(
            lambda: run_tool("rl_test_inference", context, arguments), limiter=wait_limiter
        )

    @app.post(
        "/environments/check",
        response_model=schemas.EnvironmentCheck,
        **_describe_route("rl_check_environment", "environments"),
    )
    async def check_environment(context: RequestContext, body: Annotated[CheckBody, Body()]) -> Any:  # type: ignore[valid-type]
        arguments = _read_arguments(body)
        return await anyio.to_thread.run_sync(
            lambda: run_tool("rl_check_environment", context, arguments), limiter=wait_limiter
        )


def _read_arguments(body: Any) -> Json:
    arguments: Json = body.model_dump(exclude_unset=True)
    return arguments


# The first that fits; what is left is a fault of ours.
_STATUS_CODES: tuple[tuple[type[LachesisError], int], ...] = (
    (UnknownEnvironmentError, 404),
    (UnknownRunError, 404),
    (UnknownTestError, 404),
    (UnknownFieldError, 404),
    (ModelNotFoundError, 404),
    (LockedFieldError, 403),
    (PolicyError, 403),
    (ArgumentsError, 422),
    (ConfigError, 400),
    (EnvironmentTimeoutError, 504),
    (RLEnvironmentError, 409),
    (RunError, 409),
    (CheckpointError, 409),
    (MissingKeyError, 409),
    (MissingDependencyError, 409),
    (ServerDownError, 503),
    (StorageError, 507),
)


def run_tool(tool_name: str, context: CallContext, arguments: Json | None = None) -> JSONResponse:
    """Return the answer of a tool as a response."""
    return respond(lambda: TOOLS[tool_name].run(context, arguments).to_payload())


def respond(make_answer: Callable[[], Any]) -> JSONResponse:
    """Return what a function returns, or the error that it raises, as a response."""
    body, error = run_catching_errors(make_answer)
    if error is None:
        return JSONResponse(body)
    return make_error_response(error)


def make_error_response(error: LachesisError) -> JSONResponse:
    """Return the response for an error, with the status code of its class."""
    status = next(
        (status for error_class, status in _STATUS_CODES if isinstance(error, error_class)), 500
    )
    return JSONResponse(error_to_payload(error), status)
