"""The pages beside the launcher: started once, started again, and never left behind."""

import os
import signal
import subprocess
import sys

import httpx
import psutil
import pytest

from deployments import serve
from deployments.serve import PAGES_PORT_VARIABLE, Launcher
from lachesis.base import managed_process
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.web.server import find_page_server
from tests.harness.waiting import call_again


def make_launcher(home):
    (home / "logs").mkdir(parents=True, exist_ok=True)
    return Launcher(home, None)


@pytest.fixture
def launcher(clean_environment, monkeypatch):
    """A launcher of the home that serves nothing yet."""
    monkeypatch.setenv(PAGES_PORT_VARIABLE, str(reserve_free_ports(1)[0]))
    launcher = make_launcher(clean_environment)
    yield launcher
    launcher._end_all()
    assert find_page_server(clean_environment) is None


def wait_for_page(link):
    """Return what a browser that follows the link gets, as soon as there is an answer."""
    return call_again(lambda: httpx.get(link, follow_redirects=True), httpx.ConnectError)


def read_link(capsys):
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("pages: http://127.0.0.1:")
    return line.removeprefix("pages: ")


def test_the_printed_link_opens_the_pages(launcher, capsys, clean_environment):
    launcher._start_pages()
    link = read_link(capsys)
    answer = wait_for_page(link)
    assert answer.status_code == 200
    assert "No runs yet." in answer.text
    assert httpx.get(f"{find_page_server(clean_environment)}/runs").status_code == 401
    second = make_launcher(clean_environment)
    second._start_pages()
    assert read_link(capsys).partition("/sign-in")[0] == link.partition("/sign-in")[0]
    second._end_all()
    assert wait_for_page(link).status_code == 200, "what another one has started goes on"


def test_pages_that_died_are_served_again(launcher, capsys, monkeypatch):
    launcher._start_pages()
    link = read_link(capsys)
    wait_for_page(link)
    assert launcher.pages is not None
    first = launcher.pages.process
    assert first is not None
    launcher._restart_what_died()
    assert launcher.pages.process is first
    first.kill()
    first.wait()
    launcher._restart_what_died()
    assert launcher.pages.process is first, "not at once, in case it cannot live"
    monkeypatch.setattr(managed_process, "RESTART_PAUSES_S", (0.0,))
    launcher._restart_what_died()
    assert wait_for_page(link).status_code == 200


def test_launchers_that_start_together_have_pages_of_their_own(
    launcher, capsys, monkeypatch, tmp_path
):
    other = make_launcher(tmp_path / "other")
    launcher._start_pages()
    monkeypatch.setenv("LACHESIS_HOME", str(other.home))
    other._start_pages()
    links = [line.removeprefix("pages: ") for line in capsys.readouterr().out.splitlines()]
    assert len({link.partition("/sign-in")[0] for link in links}) == 2
    assert [wait_for_page(link).status_code for link in links] == [200, 200]
    other._end_all()


def test_pages_end_when_their_launcher_was_killed(clean_environment):
    (clean_environment / "logs").mkdir()
    program = (
        "import sys, time; from pathlib import Path; from deployments.serve import Launcher; "
        "launcher = Launcher(Path(sys.argv[1]), None); launcher._start_pages(); time.sleep(60)"
    )
    env = {**os.environ, PAGES_PORT_VARIABLE: str(reserve_free_ports(1)[0])}
    launcher = subprocess.Popen(
        [sys.executable, "-c", program, str(clean_environment)], env=env, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    link = launcher.stdout.readline().decode().removeprefix("pages: ").strip()
    wait_for_page(link)
    (child,) = psutil.Process(launcher.pid).children()
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running()
    assert find_page_server(clean_environment) is None, "its file is still there"


def test_no_pages_are_served_where_the_port_is_0(clean_environment, monkeypatch, capsys):
    monkeypatch.setenv(PAGES_PORT_VARIABLE, "0")
    launcher = make_launcher(clean_environment)
    launcher._start_pages()
    launcher._restart_what_died()
    launcher._end_all()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv(PAGES_PORT_VARIABLE, "many")
    launcher._start_pages()
    assert "the environment variable LACHESIS_PAGES_PORT is 'many'" in capsys.readouterr().err


def test_no_error_ends_the_launcher(launcher, capsys, monkeypatch):
    """It holds the server, the runner and all runs; a problem that stays is told once."""
    looks: list[int] = []

    def restart():
        looks.append(1)
        if len(looks) == 4:
            launcher.stop_event.set()
        raise BlockingIOError("no process can be started")

    monkeypatch.setattr(serve, "POLL_S", 0.01)
    monkeypatch.setattr(launcher, "_restart_what_died", restart)
    launcher._watch()
    assert len(looks) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "the watch goes on after BlockingIOError: no process can be started"
