"""Answer invalid requests to our FastAPI servers with a client error.

Messages may quote half of a surrogate pair, which JSON can hold and UTF-8 cannot; it is escaped.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException


def add_error_handlers(app: FastAPI) -> None:
    """Add handlers for requests that FastAPI refuses and for text that cannot be encoded as
    UTF-8.
    """
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(UnicodeEncodeError, _handle_encode_error)


def escape_surrogates(text: object) -> str:
    """Return the text with characters that UTF-8 cannot encode replaced by backslash escapes."""
    return str(text).encode(errors="backslashreplace").decode()


async def _handle_http_exception(request: Request, error: Any) -> JSONResponse:
    return JSONResponse(
        {"detail": escape_surrogates(error.detail)}, error.status_code, error.headers
    )


async def _handle_validation_error(request: Request, error: Any) -> JSONResponse:
    details = [
        {
            "type": problem["type"],
            "loc": [escape_surrogates(part) for part in problem["loc"]],
            "msg": escape_surrogates(problem["msg"]),
        }
        for problem in error.errors()
    ]
    return JSONResponse({"detail": details}, 422)


async def _handle_encode_error(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(
        {"detail": f"the text is not valid Unicode: {escape_surrogates(error)}"}, 400
    )
