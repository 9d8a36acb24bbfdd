"""Serve HTTP by uvicorn as our programs need it, and answer requests that are invalid."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp


UVICORN_VERSION = "0.54.0"
# Seconds within which the head of a request must have arrived, and between two parts of its body.
MAX_RECEIVE_S = 30.0


class ReceiveDeadlineProtocol(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """Speak HTTP, and close a connection on which half a request has been sent.

    uvicorn itself limits only the time between two requests.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._restart_deadline()

    def data_received(self, data: bytes) -> None:
        """Wait for the next part of the request, unless the request is complete."""
        super().data_received(data)
        # Single bytes of a head do not prolong the time that it has.
        if self._deadline is None or not self._is_head_awaited():
            self._restart_deadline()

    def connection_lost(self, error: Exception | None) -> None:
        """Wait no longer."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(error)

    def _restart_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(MAX_RECEIVE_S, self._end_half_request)

    def _end_half_request(self) -> None:
        """Close a connection whose request is late, unless the application is slow."""
        self._deadline = None
        # After an upgrade another protocol reads from this connection.
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        if self._is_head_awaited():
            self.transport.abort()
        elif self.cycle.more_body and not self.cycle.response_complete:
            # The application may be the one that is slow, or that has not asked for the body.
            if self.flow.read_paused or self.cycle.waiting_for_100_continue:
                self._restart_deadline()
            else:
                self.transport.abort()

    def _is_head_awaited(self) -> bool:
        """Return whether a request is awaited whose head has not arrived.

        Between two requests uvicorn's own timer runs, which the first byte of the next one stops.
        """
        if self.cycle is None:
            return True
        return bool(self.cycle.response_complete) and self.timeout_keep_alive_task is None


class SignalFreeServer(uvicorn.Server):
    """Serve without installing signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, where uvicorn would install its handlers."""
        yield


def wrap_served_apps(wrap: Callable[[ASGIApp, str], ASGIApp]) -> None:
    """Make `uvicorn.run` serve what `wrap` returns for an application and its host."""
    run_original = uvicorn.run

    def run_wrapped(app: ASGIApp, *args: Any, host: str, **options: Any) -> None:
        options = {"http": ReceiveDeadlineProtocol, **options}
        run_original(wrap(app, host), *args, host=host, **options)

    uvicorn.run = run_wrapped  # type: ignore[assignment]


def add_error_handlers(app: FastAPI) -> None:
    """Add handlers of requests that FastAPI refuses and of text that is not UTF-8."""
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
    """Answer a request that does not fit its schema with 422 and each problem."""
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
