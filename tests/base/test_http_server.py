"""Check that what is changed in uvicorn exists in the version that is installed."""

import contextlib
import importlib.metadata
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from lachesis.base import http_server
from lachesis.base.http_server import ReceiveDeadlineProtocol, SignalFreeServer, wrap_served_apps

DEADLINE_S = 0.4
PACKAGE = Path(http_server.__file__).parents[1]


def test_it_is_the_version_that_the_module_was_written_for():
    assert importlib.metadata.version("uvicorn") == http_server.UVICORN_VERSION


def test_a_server_in_the_background_leaves_the_signals_alone():
    assert "capture_signals" in vars(uvicorn.Server), "uvicorn calls it around serving"
    before = signal.getsignal(signal.SIGTERM)
    with SignalFreeServer(uvicorn.Config(lambda: None)).capture_signals():
        assert signal.getsignal(signal.SIGTERM) is before


def test_run_serves_the_wrapped_application(monkeypatch):
    served: list[Any] = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: served.append((app, options)))
    wrap_served_apps(lambda app, host: (app, host))  # type: ignore[arg-type, return-value]
    uvicorn.run("app", host="127.0.0.1", port=1)
    options = {"host": "127.0.0.1", "port": 1, "http": ReceiveDeadlineProtocol}
    assert served == [(("app", "127.0.0.1"), options)]


@pytest.fixture
def port(monkeypatch):
    """A server that reads each body whole and gives it back; the deadline is short."""
    monkeypatch.setattr(http_server, "MAX_RECEIVE_S", DEADLINE_S)

    async def echo(scope, receive, send):
        body, has_more = b"", True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            echo,
            http=ReceiveDeadlineProtocol,
            lifespan="off",
            log_level="warning",
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
        )
        server = SignalFreeServer(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n"


@pytest.mark.parametrize(
    "parts",
    [[], [HEAD], [HEAD, *6 * [b"X"]], [HEAD + b"\r\nabc"], [HEAD + b"\r\nabcdef", HEAD]],
    ids=["nothing", "half a head", "head byte by byte", "half a body", "half a second request"],
)
def test_half_a_request_does_not_stay_open(port, parts):
    with socket.create_connection(("127.0.0.1", port), timeout=20 * DEADLINE_S) as client:
        answer = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for part in parts:
                client.sendall(part)
                time.sleep(DEADLINE_S / 4)
            while received := client.recv(1000):
                answer += received
        assert answer.count(b"200 OK") == (len(parts) == 2 and b"abcdef" in parts[0])


def test_a_slow_body_and_a_pause_between_requests_are_allowed(port):
    with socket.create_connection(("127.0.0.1", port), timeout=20 * DEADLINE_S) as client:
        for _ in range(2):
            client.sendall(HEAD + b"\r\n")
            for byte in b"abcdef":
                time.sleep(DEADLINE_S / 2)
                client.sendall(bytes([byte]))
            answer = b""
            while not answer.endswith(b"abcdef"):
                received = client.recv(1000)
                assert received, "the connection stays open"
                answer += received
            assert answer.startswith(b"HTTP/1.1 200 OK")
            time.sleep(2 * DEADLINE_S)


def test_every_server_of_ours_has_the_deadline():
    """Each call of uvicorn in the code names the protocol; Prefect's gets it by the wrapper."""
    calls = [
        (file, call)
        for file in PACKAGE.rglob("*.py")
        if file.name != "http_server.py"
        for call in re.findall(
            r"uvicorn\.(?:run|Config)\((?:[^()]|\([^()]*\))*\)", file.read_text()
        )
    ]
    assert len(calls) >= 5
    for file, call in calls:
        assert "http=ReceiveDeadlineProtocol" in call, file
