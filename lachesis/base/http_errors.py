"""How our FastAPI servers answer what they cannot take: with the client's fault, also when a message quotes text that JSON can
hold and UTF-8 cannot, which is half of a surrogate pair."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException


def add(app: FastAPI) -> None:
    """Handlers for what FastAPI itself refuses, and for text that nobody can encode."""
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(UnicodeEncodeError, _no_text)


def writable(text: object) -> str:
    return str(text).encode(errors="backslashreplace").decode()


async def _refused(request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"detail": writable(error.detail)}, error.status_code, error.headers)


async def _invalid(request: Request, error: Any) -> JSONResponse:
    found = [
        {"type": one["type"], "loc": [writable(part) for part in one["loc"]], "msg": writable(one["msg"])}
        for one in error.errors()
    ]
    return JSONResponse({"detail": found}, 422)


async def _no_text(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": f"no valid Unicode text: {writable(error)}"}, 400)
