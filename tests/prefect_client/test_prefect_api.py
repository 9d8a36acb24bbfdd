"""What the plain HTTP client makes of a server that is busy, hangs, or is none."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from lachesis.base.errors import ServerDownError
from lachesis.prefect_client.resources import PrefectApi
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
