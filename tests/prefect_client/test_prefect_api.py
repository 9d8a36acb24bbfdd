"""What the plain HTTP client makes of a server that is busy, hangs, or is none."""

import os
import subprocess
import sys

import pytest

from lachesis.base.errors import ServerDownError
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.serve_info import SERVER, write_server_info
from lachesis.supervision.services.ports import reserve_free_ports
from tests.harness.http_answers import Reply, serve_answers


class Busy:
    """Answers 503 so many times, then 200."""

    refusals = 0
    url = ""

    def answer(self, request):
        busy, self.refusals = self.refusals > 0, self.refusals - 1
        return Reply(503 if busy else 200, True)


@pytest.fixture
def server():
    busy = Busy()
    with serve_answers(busy.answer) as busy.url:
        yield busy


def test_a_busy_server_is_asked_again(server):
    """SQLite lets one write at a time; Prefect answers the others with 503."""
    api = PrefectApi(f"{server.url}/api")
    server.refusals = 2
    assert api.is_healthy()
    server.refusals = 100
    with pytest.raises(ServerDownError, match="503"):
        api.require_healthy()


def test_the_next_step_depends_on_who_starts_a_dead_server_again(tmp_path, monkeypatch):
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
