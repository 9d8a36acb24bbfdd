"""Processes of ours that are killed together with their parents, files that name the processes of
others, and proxies that cannot reach this machine.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import httpx
import psutil
import pytest

from lachesis.agent_tools.environment_checks import read_check, start_check
from lachesis.base.managed_process import ProcessIdentity
from lachesis.prefect_client.serve_info import server_file
from lachesis.runs.store import RunStore
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.web.server import find_page_server
from tests.faults.struck_home import StruckHome

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]
NO_PROXY_REACHES = "http://127.0.0.1:9"
PROXIES = {
    "http": {name: NO_PROXY_REACHES for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy")},
    "socks": {"ALL_PROXY": "socks5://127.0.0.1:9", "all_proxy": "socks5://127.0.0.1:9"},
}
HANGS = """
import time
from atroposlib.envs.base import BaseEnv
time.sleep(600)

class A(BaseEnv):
    name = "hangs"
"""
SETTINGS = ("total_steps=2", "batch_size=8", "group_size=4", "max_token_length=32")


def kill_at_once(served, *pids):
    """Stop all first, so that none of them sees another one end."""
    for pid in pids:
        with contextlib.suppress(AssertionError):
            served.strike(pid, signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # One of them may end with another.
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Place(StruckHome):
    """A home of its own, and the commands that somebody types in it."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, LACHESIS_NO_SERVE="0")

    def find(self, text: str) -> int:
        """The process of this home with this text in its command, as soon as there is one."""

        def find_pid() -> int | None:
            return next((pid for pid, cmd in self.processes().items() if text in cmd), None)

        return int(self.wait(find_pid, 60, text))

    def is_empty(self) -> bool:
        return self.processes() == {}

    def start_script(self, script: str) -> subprocess.Popen[bytes]:
        """A program that starts one of our processes."""
        return subprocess.Popen([sys.executable, "-c", script], env=self.env())


@pytest.fixture
def make_place(new_home, monkeypatch):
    places: list[Place] = []

    def make():
        places.append(Place(new_home()))
        return places[-1]

    yield make
    for place in places:
        place.stop_serving()
        kill_at_once(place, *place.processes())


@pytest.fixture
def place(make_place, monkeypatch):
    place = make_place()
    monkeypatch.setenv("LACHESIS_HOME", str(place.home))
    return place


def kill_all_of(place):
    """As the out-of-memory killer or a loss of power does."""
    assert place.launcher is not None
    kill_at_once(place, *place.processes())
    place.launcher.wait()


def test_a_home_beside_another_home_that_took_its_port(place, make_place, row):
    place.serve()
    kill_all_of(place)
    other = make_place()
    other.port = place.port
    other.serve()
    assert place.try_cli("serve", "--stop")[1] == {"stopped": False}
    code, answer = place.try_cli("train", "arithmetic", LACHESIS_NO_SERVE="1")
    assert code == 1
    assert "no Prefect server is known" in answer["error"]
    code, answer = place.try_cli("train", "arithmetic", *_edits("total_steps=2"), "--watch")
    assert (code, answer["status"]) == (0, "completed"), answer
    assert RunStore(other.home).all() == []
    assert [record.environment for record in RunStore(place.home).all()] == ["arithmetic"]
    assert place.try_cli("serve", "--stop")[1] == {"stopped": True}
    place.wait(place.is_empty, 60, "the end of every process")
    assert other._is_whole(), "nothing of the other home was ended"
    row(
        fault="serve SIGKILL, another home took its port",
        phase="idle",
        expected="each home its own",
        seen="started again elsewhere, trained; the other home untouched",
    )


def test_a_server_whose_port_another_home_took_before_it_was_started_again(place, make_place, row):
    place.serve()
    launcher, server = place.launcher, place.part("server")
    assert launcher is not None
    with stopped(launcher.pid):
        place.strike(server, signal.SIGKILL)
        other = make_place()
        other.port = place.port
        other.serve()
        code, answer = place.try_cli("train", "arithmetic")
        assert code == 1, answer
        assert "no longer listens" in answer["error"]
        assert RunStore(other.home).all() == []
    time.sleep(10)
    assert launcher.poll() is None, "it tries again until the port is free"
    other.stop_serving()
    place.wait(lambda: place.try_cli("doctor")[1] and place._is_whole(), 120, "the server again")
    code, answer = place.try_cli("train", "arithmetic", *_edits("total_steps=2"), "--watch")
    assert (code, answer["status"]) == (0, "completed"), answer
    row(
        fault="server SIGKILL, another home took its port",
        phase="idle",
        expected="refused",
        seen="refused; served again when the port was free",
    )


def test_a_stored_process_that_is_a_stranger(place, row):
    """After a reboot, the ids in the file of a home are anybody's."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        try:
            identity = ProcessIdentity.read(stranger.pid)
            assert identity is not None
            earlier = asdict(ProcessIdentity(stranger.pid, "another boot:7"))
            info = {
                "home": str(place.home),
                "api_url": f"http://127.0.0.1:{place.port}/api",
                "ui_url": f"http://127.0.0.1:{place.port}",
                "keys": [],
                "max_runs": 4,
                "processes": dict.fromkeys(("launcher", "server", "runner"), earlier),
            }
            server_file(place.home).write_text(json.dumps(info))
            (place.home / "ui.json").write_text(
                json.dumps({"home": str(place.home), "address": "x", "process": earlier})
            )
            assert place.try_cli("serve", "--stop")[1] == {"stopped": False}
            assert find_page_server(place.home) is None
            # Another home's file, copied with its folder, names processes that live.
            info |= {"home": "/elsewhere", "processes": {"launcher": asdict(identity)}}
            server_file(place.home).write_text(json.dumps(info))
            assert place.try_cli("serve", "--stop")[1] == {"stopped": False}
            assert stranger.poll() is None
        finally:
            stranger.kill()
    row(fault="stored pids are a stranger's", phase="idle", expected="untouched", seen="untouched")


def _edits(*values):
    words = [*SETTINGS, "use_wandb=False", "final_evaluation=False", *values]
    return tuple(word for value in words for word in ("--set", value))


@pytest.mark.parametrize("kind", PROXIES)
def test_a_proxy_that_cannot_reach_this_machine(place, kind, row):
    proxies = PROXIES[kind]
    place.serve(**proxies)
    code, answer = place.try_cli("train", "arithmetic", *_edits(), "--watch", **proxies)
    assert (code, answer["status"]) == (0, "completed"), answer
    code, answer = place.try_cli("test", "arithmetic", "--steps", "1", **proxies)
    assert code == 0, answer
    port = reserve_free_ports(1)[0]
    # `serve` has pages already; those of a command are asked for by a port.
    with subprocess.Popen(
        [sys.executable, "-m", "lachesis.cli.main", "ui", "--port", str(port)],
        env={**place.env(), **proxies},
        stdout=subprocess.PIPE,
    ) as pages:
        assert pages.stdout is not None
        link = pages.stdout.readline().decode().strip()

        def is_served():
            try:
                return httpx.get(link, follow_redirects=True).status_code == 200
            except httpx.ConnectError:
                return False

        place.wait(is_served, 30, "the page")
        pages.terminate()
    row(fault=f"{kind} proxy", phase="all", expected="as without", seen="serve, train, test, ui")


# --- each way to start a process, killed together with the process that started it


def test_launcher_with_server_and_pages(place, row):
    place.serve()
    assert place.launcher is not None
    pages = place.find("lachesis.web")
    kill_at_once(place, place.launcher.pid, place.part("server"), pages)
    place.launcher.wait()
    assert find_page_server(place.home) is None
    code, answer = place.try_cli("train", "arithmetic")
    assert code == 1, "the runner still holds the home"
    assert "lachesis doctor --fix" in answer["error"]
    assert place.try_cli("doctor", "--fix")[0] == 0
    assert place.is_empty()
    place.serve()
    assert place._is_whole()
    row(
        fault="launcher, server, pages SIGKILL",
        phase="idle",
        expected="doctor --fix",
        seen="doctor --fix ends the runner; served again",
    )


def test_launcher_in_the_background_with_its_command(place, row):
    starter = place.start_script(
        "from lachesis.prefect_client.background_serve import start_background_server; "
        "start_background_server()"
    )
    launcher = place.find("deployments.serve")
    kill_at_once(place, starter.pid, launcher)
    starter.wait()
    place.try_cli("doctor", "--fix")
    place.wait(place.is_empty, 60, "the end of every process")
    code, answer = place.try_cli("train", "arithmetic", *_edits(), "--watch")
    assert (code, answer["status"]) == (0, "completed"), answer
    place.try_cli("serve", "--stop")
    row(
        fault="command and its launcher SIGKILL",
        phase="starting",
        expected="nothing left",
        seen="nothing left; trained",
    )


@pytest.mark.parametrize("struck", ["both", "parent"])
def test_child_that_reads_a_schema(place, tmp_path, struck, row):
    (tmp_path / "hangs.py").write_text(HANGS)
    reader = place.start_script(
        "from pathlib import Path; from lachesis.environment_catalog import lookup; "
        f"lookup.load_schema(lookup.find_environment('hangs', [Path({str(tmp_path)!r})]))"
    )
    child = place.find("environment_process")
    kill_at_once(place, *([reader.pid, child] if struck == "both" else [reader.pid]))
    reader.wait()
    place.wait(place.is_empty, 20, "the end of every process")
    row(
        fault=f"reader of a schema SIGKILL, {struck}",
        phase="import",
        expected="nothing left",
        seen="nothing left",
    )


def test_check_of_an_agent_with_its_server(place, tmp_path, monkeypatch, row):
    starter = place.start_script(
        "import time; from lachesis.agent_tools.environment_checks import start_check; "
        "start_check('arithmetic', new=False, install=False, model=None); time.sleep(600)"
    )
    check = place.find("-m lachesis.agent_tools.environment_checks")
    check_id = psutil.Process(check).cmdline()[-1]
    place.find("environment_process")
    kill_at_once(place, starter.pid, check)
    starter.wait()
    place.wait(lambda: read_check(check_id).status == "failed", 10, "the end of the check")
    job = read_check(check_id)
    assert "the process of the check was ended" in str(job.error)
    place.wait(place.is_empty, 30, "the end of every process")
    again = start_check("arithmetic", new=False, install=False, model=None)
    assert again.test_id != check_id
    place.wait(lambda: read_check(again.test_id).status != "running", 240, "the check")
    assert read_check(again.test_id).error is None
    row(
        fault="agent's check and its parent SIGKILL",
        phase="check",
        expected="failed, nothing left",
        seen="failed, nothing left; the next one passes",
    )


def test_stages_with_their_reaper(place, tmp_path, row):
    (tmp_path / "hangs.py").write_text(HANGS)
    place.serve(LACHESIS_ENVIRONMENTS=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-m", "lachesis.cli.main", "env", "check", str(tmp_path / "hangs.py")],
        env=place.env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as check:
        child = place.find("environment_process")
        kill_at_once(place, check.pid, child)
    place.wait(lambda: "hangs.py" not in str(place.processes()), 30, "the end of its processes")
    row(
        fault="check and its stages SIGKILL",
        phase="import",
        expected="nothing left",
        seen="nothing left",
    )


@pytest.mark.parametrize("pair", [("flow", "reaper"), ("reaper", "trainer")], ids="+".join)
def test_services_with_their_reaper(served, pair, row):
    run = served.take("running")
    run.reach("running")
    kill_at_once(served, *(run.pid(part) for part in pair))
    record = run.ended(240)
    assert record.status == "failed"
    run.resume()
    served.current = run
    row(
        fault=f"{' and '.join(pair)} SIGKILL",
        phase="running",
        expected="failed",
        seen="failed, nothing left; resumed",
        kept=run.kept(),
    )
