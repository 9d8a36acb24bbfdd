"""Change parts of uvicorn that it documents no way to change.

A server in the background of another program must leave the program's signal handlers alone, and
`prefect server start` calls `uvicorn.run` with an application that has to be guarded. Everything
here was written for version `UVICORN_VERSION`; a test fails when another one is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from starlette.types import ASGIApp

UVICORN_VERSION = "0.54.0"


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
        run_original(wrap(app, host), *args, host=host, **options)

    uvicorn.run = run_wrapped  # type: ignore[assignment]
