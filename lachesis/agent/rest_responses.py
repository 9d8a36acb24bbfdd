"""Turn the answers and errors of tools into HTTP responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse

from lachesis.agent.tools import TOOLS, CallContext, run_catching_errors
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
from lachesis.base.json_text import Json, error_to_payload

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
