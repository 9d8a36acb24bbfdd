"""What a child may see, and which ports it gets."""

import os
import platform
import socket
import subprocess
import sys
import tempfile

import pytest

from lachesis.base.errors import PortInUseError
from lachesis.base.secrets import build_child_env, find_secret_values, read_passed_variables, redact
from lachesis.supervision.services import ports
from lachesis.supervision.services.ports import check_port, choose_port, reserve_free_ports


def test_secrets_and_misleading_variables_do_not_reach_a_child():
    """A child gets a secret only when it is handed to it by name."""
    source = {
        "PATH": "/bin",
        "TINKER_API_KEY": "s",
        "WANDB_API_KEY": "s",
        "DB_PASSWORD": "s",
        "MY_SECRET": "s",
        "SLURM_JOB_NODELIST": "n",
        "ATROPOS_PROXY_URL": "u",
        "OPENAI_BASE_URL": "u",
        "PREFECT_API_URL": "u",
        "LACHESIS_HOME": "h",
        "LACHESIS_TOKEN": "s",
        "SOMETHING_ELSE": "x",
        "HF_HOME": "f",
        "HF_TOKEN": "s",
    }
    kept = {"PATH": "/bin", "LACHESIS_HOME": "h", "HF_HOME": "f"}
    assert build_child_env({"EXTRA": "1"}, source) == {**kept, "EXTRA": "1"}
    assert build_child_env({"TINKER_API_KEY": "t"}, source)["TINKER_API_KEY"] == "t"


def test_the_user_chooses_what_environments_see(monkeypatch):
    for name, value in {
        "WIKI_DIR": "w",
        "SEARCH_API_KEY": "s",
        "SEARCH_URL": "u",
        "OTHER": "o",
    }.items():
        monkeypatch.setenv(name, value)
    assert read_passed_variables() == {}
    monkeypatch.setenv("LACHESIS_ENVIRONMENT_VARIABLES", "WIKI_DIR, SEARCH_*")
    assert read_passed_variables() == {"WIKI_DIR": "w", "SEARCH_API_KEY": "s", "SEARCH_URL": "u"}


def test_no_text_shows_a_secret(monkeypatch):
    """Nor the password in an address."""
    monkeypatch.setenv("MY_TOKEN", "abcdefgh")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hunter2hunter2@proxy:3128")
    assert redact("abcdefgh hunter2hunter2 me") == "*** *** me"


def test_each_line_of_a_secret_is_one():
    """A log is written line by line."""
    assert set(find_secret_values({"MY_KEY": "first line\nsecond line\n}"})) == {
        "first line\nsecond line\n}",
        "first line",
        "second line",
    }


def test_free_ports_differ_and_are_free():
    ports = reserve_free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        check_port(port)


@pytest.mark.skipif(
    platform.system() != "Linux",
    reason="other systems do not let a second socket have a reserved port",
)
def test_a_port_is_given_to_nobody_else_until_its_service_listens():
    """Two runs that started together were given the same port, and one of them failed."""
    (port,) = reserve_free_ports(1)
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as service:
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(PortInUseError):
            check_port(port)
        service.accept()[0].close()
    with socket.create_server(("127.0.0.1", port)):
        """The service is restarted."""


@pytest.mark.skipif(
    platform.system() != "Linux",
    reason="other systems do not let a second socket have a reserved port",
)
def test_a_process_that_launches_for_ever_does_not_run_out_of_sockets():
    released = reserve_free_ports(5)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        reserve_free_ports(3)
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    # Another program may have taken some of them meanwhile, but not all.
    assert any(map(can_bind, released))


def can_bind(port):
    with socket.socket() as stranger:
        try:
            stranger.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.mark.parametrize("port", [0, -1, 65536, 99999])
def test_a_port_out_of_range_is_refused(port):
    """The Atropos API would listen on another port without a word."""
    with pytest.raises(PortInUseError, match="allowed: 1 to 65535"):
        check_port(port)


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"):
            check_port(port)


CHOOSE_AND_WAIT = """
import sys
from lachesis.supervision.services.ports import choose_port
print(choose_port(int(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_two_processes_never_choose_the_same_port(tmp_path, monkeypatch):
    """Neither listens yet, as two launchers that start in the same seconds."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def choose():
        return subprocess.Popen(
            [sys.executable, "-c", CHOOSE_AND_WAIT, str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    with choose() as first, choose() as second:
        chosen = {int(process.stdout.readline()) for process in (first, second) if process.stdout}
        assert len(chosen) == 2
        assert port in chosen
        first.communicate()
        second.communicate()
    assert choose_port(port) == port, "both have ended"
    assert choose_port(port) == port, "a process may choose its own port again"


def test_a_port_that_another_process_has_chosen_is_not_taken_for_a_free_one(tmp_path, monkeypatch):
    """The other one does not listen yet, so the system may give its port to anybody."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        chosen = server.getsockname()[1]
    other = reserve_free_ports(1)[0]
    monkeypatch.setattr(ports, "_lock_port", lambda port: False)
    monkeypatch.setattr(ports, "reserve_free_ports", lambda count: [chosen, other][:count])
    assert choose_port(chosen) == other
