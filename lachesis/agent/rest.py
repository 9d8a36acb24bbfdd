"""The tools as plain HTTP routes. Success is 200 with JSON; anything else is an error, with `error` and `code` in its JSON.

A session is named by the header X-Lachesis-Session; without it all clients share one. The limit of status reports is the
client's own here, so the service does not count a second time.
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
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from lachesis import __version__
from lachesis.agent import schemas
from lachesis.agent.session import Desk
from lachesis.agent.tools import TABLE, Call, Json, told
from lachesis.base.errors import (
    ArgumentsError,
    CheckpointError,
    ConfigError,
    RLEnvironmentError,
    EnvironmentTimeoutError,
    LachesisError,
    LockedFieldError,
    MissingDependencyError,
    MissingKeyError,
    ModelNotFoundError,
    RunError,
    ServerDownError,
    StorageError,
    UnknownEnvironmentError,
    UnknownFieldError,
    UnknownRunError,
    UnknownTestError,
    error_to_payload,
)
from lachesis.base.http_guard import ASGIApp, HttpGuard
from lachesis.reporting.status import ResponseModel, RunResults, RunStatus

_STATUS: tuple[tuple[type[LachesisError], int], ...] = (
    (UnknownEnvironmentError, 404),
    (UnknownRunError, 404),
    (UnknownTestError, 404),
    (UnknownFieldError, 404),
    (ModelNotFoundError, 404),
    (LockedFieldError, 403),
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
"""The first that fits; what is left is a fault of ours."""


class ErrorBody(ResponseModel):
    """What every status but 200 has as its body."""

    error: str
    code: str


class Entrance(ResponseModel):
    """What the address by itself answers, without a token."""

    name: str
    version: str
    docs: str
    """The path of the page that describes the routes."""
    health: str
    """The path of the health check, which needs the token where there is one."""


class SelectBody(BaseModel):
    """Where to train, and which model."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    profile: str | None = None
    model: str | None = None


ERRORS: dict[int | str, Json] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (
        (400, "a configuration that cannot work"),
        (401, "no bearer token, where one is needed"),
        (403, "a locked field, or a foreign Host or Origin"),
        (404, "no such environment, field, model or run"),
        (409, "not possible in this state, an environment that cannot be imported, or a key is missing"),
        (411, "a body without its length"),
        (413, "a body beyond a megabyte"),
        (422, "arguments of the wrong form"),
        (503, "the Prefect server does not answer"),
        (504, "an environment whose import does not end"),
        (507, "the disk refused"),
    )
}


def _session(
    x_lachesis_session: Annotated[str | None, Header(description="The name of this client's state")] = None,
) -> Call:
    return Call(Desk(x_lachesis_session or os.environ.get("LACHESIS_SESSION") or "http"))


Caller = Annotated[Call, Depends(_session)]
PAGE = ("/", "/docs", "/openapi.json", "/static-offline-docs/")
"""What describes the routes and tells nothing else; a browser cannot send a token before it has the page."""
MOST_WAITING = 100
"""Calls that may wait for an inference test at once; they are threads of their own, so that others are answered meanwhile."""
EditBody = TABLE["rl_edit_config"].arguments
StartBody = TABLE["rl_start_training"].arguments
TestBody = TABLE["rl_test_inference"].arguments
CheckBody = TABLE["rl_check_environment"].arguments
RunId = Annotated[str, Path(description="Eight hexadecimal digits")]


def create_app(*, host: str = "127.0.0.1", token: str | None = None, allowed_hosts: Iterable[str] = ()) -> ASGIApp:
    """The ASGI application."""
    return HttpGuard(routes(), host=host, token=token, allowed_hosts=allowed_hosts, open_paths=PAGE)


def routes() -> FastAPI:
    """The routes without the guard before them. The page at /docs loads nothing from elsewhere."""
    waiting = anyio.CapacityLimiter(MOST_WAITING)
    app: FastAPI = FastAPIOffline(
        title="Lachesis",
        version=__version__,
        description=__doc__,
        responses=ERRORS,
        dependencies=[Security(HTTPBearer(auto_error=False))],  # for the page: the guard has asked for the token already
    )

    def shown(tool: str, tag: str) -> Json:
        made = TABLE[tool]
        return {"summary": f"{made.title} ({tool})", "description": made.description, "tags": [tag]}

    @app.exception_handler(LachesisError)
    async def refused_session(request: Request, error: LachesisError) -> JSONResponse:
        return _error(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        found = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        json_sent = "json" in request.headers.get("content-type", "json")
        hint = "" if json_sent else "; send Content-Type: application/json"
        return _error(ArgumentsError(f"the request is not of the right form: {found}{hint}"))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail), "code": f"http_{error.status_code}"}, error.status_code, error.headers)

    @app.get("/", response_model=Entrance, summary="What answers here, and where its documentation is", tags=["service"])
    def entrance() -> Entrance:
        return Entrance(name="lachesis", version=__version__, docs="/docs", health="/health")

    @app.get("/health", response_model=schemas.Health, **shown("rl_health_check", "service"))
    def health(call: Caller) -> Any:
        return _answer("rl_health_check", call)

    @app.get("/environments", response_model=list[schemas.EnvironmentEntry], **shown("rl_list_environments", "environments"))
    def environments(call: Caller) -> Any:
        return _told(lambda: call.desk.environments().to_payload()["environments"])

    @app.post("/environments/{name}/select", response_model=schemas.Selected, **shown("rl_select_environment", "environments"))
    def select(call: Caller, name: str, body: Annotated[SelectBody | None, Body()] = None) -> Any:
        return _answer("rl_select_environment", call, {"name": name, **(_given(body) if body else {})})

    @app.get("/config", response_model=schemas.CurrentConfig, **shown("rl_get_current_config", "configuration"))
    def config(call: Caller) -> Any:
        return _answer("rl_get_current_config", call)

    @app.post("/config", response_model=schemas.Edited, **shown("rl_edit_config", "configuration"))
    def edit(call: Caller, body: EditBody) -> Any:  # type: ignore[valid-type]
        return _answer("rl_edit_config", call, _given(body))

    @app.get("/runs", response_model=schemas.RunList, **shown("rl_list_runs", "runs"))
    def runs(call: Caller) -> Any:
        return _answer("rl_list_runs", call)

    @app.post("/runs", response_model=schemas.Started, **shown("rl_start_training", "runs"))
    def start(
        call: Caller,
        body: Annotated[StartBody | None, Body()] = None,  # type: ignore[valid-type]
    ) -> Any:
        return _answer("rl_start_training", call, _given(body) if body else {})

    @app.get("/runs/{run_id}", response_model=RunStatus, **shown("rl_check_status", "runs"))
    def status(call: Caller, run_id: RunId) -> Any:
        return _told(lambda: call.desk.live_status(run_id).to_payload())

    @app.post("/runs/{run_id}/stop", response_model=schemas.Stopped, **shown("rl_stop_training", "runs"))
    def stop(call: Caller, run_id: RunId) -> Any:
        return _answer("rl_stop_training", call, {"run_id": run_id})

    @app.get("/runs/{run_id}/metrics", response_model=RunResults, **shown("rl_get_results", "runs"))
    def metrics(call: Caller, run_id: RunId) -> Any:
        return _answer("rl_get_results", call, {"run_id": run_id})

    @app.post("/test/inference", response_model=schemas.TestReport, **shown("rl_test_inference", "inference test"))
    async def test_inference(
        call: Caller,
        body: Annotated[TestBody | None, Body()] = None,  # type: ignore[valid-type]
    ) -> Any:
        arguments = _given(body) if body else {}
        return await anyio.to_thread.run_sync(lambda: _answer("rl_test_inference", call, arguments), limiter=waiting)

    @app.post("/environments/check", response_model=schemas.EnvironmentCheck, **shown("rl_check_environment", "environments"))
    async def check_environment(call: Caller, body: Annotated[CheckBody, Body()]) -> Any:  # type: ignore[valid-type]
        arguments = _given(body)
        return await anyio.to_thread.run_sync(lambda: _answer("rl_check_environment", call, arguments), limiter=waiting)

    return app


def _given(body: Any) -> Json:
    given: Json = body.model_dump(exclude_unset=True)
    return given


def _answer(tool: str, call: Call, arguments: Json | None = None) -> JSONResponse:
    return _told(lambda: TABLE[tool].run(call, arguments).to_payload())


def _told(answer: Callable[[], Any]) -> JSONResponse:
    found, error = told(answer)
    return JSONResponse(found) if error is None else _error(error)


def _error(error: LachesisError) -> JSONResponse:
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    return JSONResponse(error_to_payload(error), status)
