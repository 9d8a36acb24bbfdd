"""Two hundred wrong requests a second at each server, and what is right goes on."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from lachesis.supervision.services.ports import reserve_free_ports
from tests.faults.struck_home import KEY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]
FLOOD_S = 10.0


@dataclass
class Flood:
    """How often a server answered with which status, and how many requests a second it was sent."""

    answers: dict[int, int] = field(default_factory=dict)
    rate: float = 0.0


@pytest.mark.parametrize("server", ["engine", "trainer", "api", "prefect"])
def test_wrong_requests_at_a_server_of_a_run(served, row, server):
    run = served.take("running")
    run.reach("running")
    port = served.port if server == "prefect" else run.record.services[server].port
    with flooded(f"http://127.0.0.1:{port}") as flood:
        run.advances(5)
    assert run.record.status == "running"
    served.current = run
    told = f"{flood.rate:.0f} wrong requests/s at {server}"
    row(
        fault=told,
        phase="running",
        expected="trains on",
        seen=json.dumps(flood.answers),
        kept=run.kept(),
    )


@pytest.mark.parametrize("words", [("api",), ("mcp", "--http")], ids=lambda words: words[0])
def test_wrong_requests_at_a_service_for_agents(served, row, words):
    """With the right token it answers then, and its log does not hold what was sent as one."""
    port, log = reserve_free_ports(1)[0], served.home / "logs" / f"{words[0]}.log"
    url, command = (
        f"http://127.0.0.1:{port}",
        [sys.executable, "-m", "lachesis.cli.main", *words, "--port", str(port)],
    )
    with log.open("wb") as stream:
        service = subprocess.Popen(command, env=served.env(), stdout=stream, stderr=stream)
    try:
        served.wait(lambda: _status("GET", url), 60, "an answer", poll_s=0.2)
        with flooded(url) as flood:
            pass
        bearer = {"Authorization": f"Bearer {(served.home / 'token').read_text()}"}
        right = ("GET", f"{url}/runs") if words == ("api",) else ("POST", f"{url}/mcp")
        expected = 200 if words == ("api",) else 400  # what was sent to the latter is no message
        assert (_status(*right), _status(*right, bearer)) == (401, expected)
        assert service.poll() is None
    finally:
        service.terminate()
        service.wait(20)
    assert KEY not in log.read_text()
    told = f"{flood.rate:.0f} wrong requests/s at lachesis {words[0]}"
    row(fault=told, phase="serving", expected="answers", seen=json.dumps(flood.answers))


def _status(method, url, headers=None):
    """0 when nobody answers."""
    accepts = {"Accept": "application/json", **(headers or {})}
    try:
        return httpx.request(method, url, headers=accepts, timeout=10, trust_env=False).status_code
    except httpx.HTTPError:
        return 0


@contextlib.contextmanager
def flooded(url):
    """The server there is asked wrong things while the block lasts, and for some seconds at least;
    none of its answers may tell of a fault of its own.
    """
    flood, stop, began = Flood(), threading.Event(), time.monotonic()
    threads = [threading.Thread(target=_pester, args=(url, flood.answers, stop)) for _ in range(8)]
    for one in threads:
        one.start()
    try:
        yield flood
        time.sleep(max(0.0, FLOOD_S - (time.monotonic() - began)))
    finally:
        stop.set()
        for one in threads:
            one.join()
    flood.rate = sum(flood.answers.values()) / (time.monotonic() - began)
    assert not [status for status in flood.answers if status >= 500], flood.answers


def _pester(url, counts, stop):
    """Fifty a second: paths that are none, wrong bodies, wrong tokens, foreign names."""
    wrong = f"tml-{KEY}-wrong"
    tries: list[dict[str, Any]] = [
        {"method": "GET", "url": "/nothing"},
        {
            "method": "POST",
            "url": "/api/v1/forward_backward",
            "content": b"\xff" * 100,
            "headers": {"X-API-Key": wrong},
        },
        {"method": "POST", "url": "/v1/chat/completions", "json": {"messages": 7}},
        {
            "method": "POST",
            "url": "/scored_data",
            "json": {"tokens": [[1]], "masks": [[1]], "scores": []},
        },
        {"method": "GET", "url": "/reset_data", "headers": {"Host": "evil.example"}},
        {"method": "POST", "url": "/api/flow_runs/filter", "json": {"flow_runs": 7}},
    ]
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        number = 0
        while not stop.is_set():
            begun = time.monotonic()
            status = client.request(**tries[number % len(tries)]).status_code
            counts[status] = counts.get(status, 0) + 1
            number += 1
            time.sleep(max(0.0, 0.02 - (time.monotonic() - begun)))
