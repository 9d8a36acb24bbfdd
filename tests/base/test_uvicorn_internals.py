"""Check that what is changed in uvicorn exists in the version that is installed."""

from __future__ import annotations

import importlib.metadata
import signal
from typing import Any

import pytest
import uvicorn

from lachesis.base import uvicorn_internals
from lachesis.base.uvicorn_internals import SignalFreeServer, wrap_served_apps


def test_it_is_the_version_that_the_module_was_written_for() -> None:
    assert importlib.metadata.version("uvicorn") == uvicorn_internals.UVICORN_VERSION


def test_a_server_in_the_background_leaves_the_signals_alone() -> None:
    assert "capture_signals" in vars(uvicorn.Server), "uvicorn calls it around serving"
    before = signal.getsignal(signal.SIGTERM)
    with SignalFreeServer(uvicorn.Config(lambda: None)).capture_signals():
        assert signal.getsignal(signal.SIGTERM) is before


def test_run_serves_the_wrapped_application(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: served.append((app, options)))
    wrap_served_apps(lambda app, host: (app, host))  # type: ignore[arg-type, return-value]
    uvicorn.run("app", host="127.0.0.1", port=1)
    assert served == [(("app", "127.0.0.1"), {"host": "127.0.0.1", "port": 1})]
