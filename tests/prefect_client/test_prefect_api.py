"""What the plain HTTP client makes of a server that is busy, hangs, or is none."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lachesis.base.errors import ServerDownError
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.serve_info import SERVER, write_server_info
from lachesis.supervision.services.ports import reserve_free_ports
from tests.patience import POLL_S


class Busy(http.server.ThreadingHTTPServer):
    """Answers 503 so many times, then 200."""

    refusals = 0


class Handler(http.server.BaseHTTPRequestHandler):
    server: Busy

    def do_GET(self) -> None:
        busy, self.server.refusals = self.server.refusals > 0, self.server.refusals - 1
        self.send_response(503 if busy else 200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Busy]:
    with Busy(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
        yield server
        server.shutdown()


def test_a_busy_server_is_asked_again(server: Busy) -> None:
    """SQLite lets one write at a time; Prefect answers the others with 503."""
    api = PrefectApi(f"http://127.0.0.1:{server.server_address[1]}/api")
    server.refusals = 2
    assert api.is_healthy()
    server.refusals = 100
    with pytest.raises(ServerDownError, match="503"):
        api.require_healthy()


def test_the_next_step_depends_on_who_starts_a_dead_server_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `serve` that runs restarts its server; to start a second `serve` would be refused."""
    monkeypatch.setenv("LACHESIS_HOME", str(tmp_path))
    url = f"http://127.0.0.1:{reserve_free_ports(1)[0]}/api"
    with subprocess.Popen([sys.executable, "-c", ""]) as server:
        write_server_info(tmp_path, url, {SERVER: server.pid}, max_runs=1, key_places={})
        server.wait()
    with pytest.raises(ServerDownError, match="starts it again by itself"):
        PrefectApi().require_healthy()
    info = (tmp_path / "server.json").read_text()
    (tmp_path / "server.json").write_text(info.replace(f'"pid": {os.getpid()}', '"pid": 1'))
    with pytest.raises(ServerDownError, match="start it with `lachesis serve`"):
        PrefectApi(url).require_healthy()
