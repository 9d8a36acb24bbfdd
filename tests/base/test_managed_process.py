"""A process of ours is started, known again, restarted and ended, whatever it does."""

import json
import os
import signal
import sys
import time
from dataclasses import asdict

import psutil
import pytest

from lachesis.base import managed_process
from lachesis.base.errors import EnvironmentLoadError, ProcessExitedError, StorageError
from lachesis.base.managed_process import (
    OUTPUT_TAIL_BYTES,
    ManagedProcess,
    ProcessIdentity,
    run_bounded,
)
from lachesis.environment_catalog import lookup
from tests.environment_check.test_check import lachesis
from tests.harness.waiting import wait_until

BASE = "from atroposlib.envs.base import BaseEnv\nclass A(BaseEnv):\n    pass\n"


def run(code, *, timeout_s=60.0, request=b""):
    started = time.monotonic()
    ended = run_bounded(
        [sys.executable, "-S", "-c", code],
        input_bytes=request,
        env=dict(os.environ),
        timeout_s=timeout_s,
    )
    return ended, time.monotonic() - started


def test_a_child_that_ends_is_told_with_its_last_words():
    ended, _ = run(
        "import sys; print(sys.stdin.read() * 2); print(repr(sys.stdin.read()), file=sys.stderr); "
        "sys.exit(3)",
        request=b"ab",
    )
    assert (ended.end_reason, ended.exit_code, ended.last_lines(5)) == ("exit", 3, "abab\n''")


@pytest.mark.parametrize(
    "code",
    [
        "while True: print('x' * 1000)",
        "import sys\nwhile True: sys.stderr.write('no end of line ')",
        "import os\nos.fork()\nwhile True: os.write(1, b'y\\n' * 30000)",
        "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: os.write(2, "
        "bytes(60000))",
    ],
)
def test_output_without_end_is_cut_off(code):
    ended, took_s = run(code)
    assert (ended.end_reason, ended.exit_code) == ("output", -9)
    assert len(ended.output) <= OUTPUT_TAIL_BYTES
    assert len(ended.last_lines(3)) < 2000
    assert took_s < 30


def test_a_child_that_never_ends_is_ended_with_its_children(tmp_path):
    pid = tmp_path / "pid"
    sleeps = (
        f"import os, time\nif os.fork() == 0: open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
    )
    ended, _ = run(sleeps + "os.close(1)\nos.close(2)\ntime.sleep(600)", timeout_s=2)
    assert (ended.end_reason, ended.exit_code) == ("time", -9)
    number = int(pid.read_text())
    wait_until(
        lambda: (
            not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE
        ),
        10,
    )


def test_a_grandchild_that_holds_the_output_open_is_not_waited_for():
    ended, took_s = run(
        "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nprint('done', "
        "flush=True)\nos._exit(0)"
    )
    assert (ended.end_reason, ended.exit_code, ended.output) == ("exit", 0, "done\n")
    assert took_s < 30


def test_an_environment_that_reads_its_input_is_told_so(tmp_path):
    (tmp_path / "asks.py").write_text("name = input('your name? ')\n" + BASE)
    with pytest.raises(EnvironmentLoadError, match=r"EOFError at asks\.py:1: EOF when reading"):
        lookup.load_schema(lookup.find_environment("asks", [tmp_path]))


def test_a_check_of_a_file_that_prints_without_end_is_one_line(tmp_path):
    (tmp_path / "loud.py").write_text("while True:\n    print('all work and no play')\n" + BASE)
    started = time.monotonic()
    code, found, said = lachesis("env", "check", "loud.py", home=tmp_path / "home", cwd=tmp_path)
    assert time.monotonic() - started < 60
    told = str(found or said)
    assert code == 1
    assert "because it printed more than 10 MB; its last line: 'all work and no play'" in told
    assert "Traceback" not in told + said


def start(tmp_path, code, **options):
    process = ManagedProcess(
        "clock", [sys.executable, "-S", "-c", code], tmp_path / "clock.log", **options
    )
    process.start()
    return process


def test_an_identity_is_that_of_one_process(tmp_path):
    """Not that of a later one with the same id, nor of a zombie, and it survives a file."""
    process = start(tmp_path, "import time; time.sleep(600)")
    identity = ProcessIdentity.read(process.pid)
    assert identity is not None
    assert identity.is_alive()
    assert ProcessIdentity.from_json(json.loads(json.dumps(asdict(identity)))) == identity
    for content in (None, [], {"pid": 1}, {"pid": "1", "started_at": "x"}):
        assert ProcessIdentity.from_json(content) is None
    stranger = ProcessIdentity(process.pid, "another boot:1")
    stranger.send_signal(signal.SIGKILL)
    assert process.is_running
    identity.send_signal(signal.SIGKILL)
    wait_until(lambda: not identity.is_alive(), 10)  # As a zombie it is not.
    assert ProcessIdentity.read(process.pid) is None
    assert process.wait() == -9


def test_an_identity_without_proc_is_the_same(monkeypatch):
    """macOS has none."""
    own = ProcessIdentity._read_without_proc(os.getpid())
    assert own is not None
    assert own == ProcessIdentity._read_without_proc(os.getpid())
    assert ProcessIdentity._read_without_proc(2**22) is None


def test_a_process_that_died_is_started_again_after_longer_and_longer_pauses(
    tmp_path, monkeypatch, capsys
):
    now = 1000.0
    monkeypatch.setattr(managed_process.time, "monotonic", lambda: now)
    process = start(tmp_path, "print('bye'); raise SystemExit(3)")
    pauses = []
    for _ in range(6):
        process.wait()
        before = now
        while not process.restart_if_dead():
            now += 0.5
        pauses.append(now - before)
    assert pauses == [1.0, 5.0, 15.0, 60.0, 60.0, 60.0]
    assert capsys.readouterr().err.splitlines()[0] == (
        f"restarting in 1 s: the clock exited with code 3, see {process.log}; its last lines:"
    )
    process.wait()
    assert (tmp_path / "clock.log.1").read_text() == "bye\n", "what it said before is kept"
    now += managed_process.RESTART_RESET_S + 1
    process.restart_if_dead()
    now += 1.0
    assert process.restart_if_dead(), "one that has run for long begins again"
    process.wait()


def test_what_cannot_be_started_again_now_is_tried_later(tmp_path, monkeypatch):
    """A full disk must not end the launcher, and all runs with it."""
    monkeypatch.setattr(managed_process, "RESTART_PAUSES_S", (0.0,))
    process = start(tmp_path, "")
    process.wait()
    process.log = tmp_path / "nothing" / "clock.log"
    assert not process.restart_if_dead()
    process.log.parent.mkdir()
    assert process.restart_if_dead()
    process.wait()


def test_a_log_is_its_owners_alone(tmp_path):
    process = start(tmp_path, "")
    process.wait()
    assert process.log.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("is_hung", [False, True])
def test_a_process_ends_with_its_children(tmp_path, is_hung):
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if is_hung else ""
    process = start(
        tmp_path, f"{ignore}import os, time\nos.fork()\nprint('up', flush=True)\ntime.sleep(600)"
    )
    process.wait_until_ready(lambda: process.log.read_text() == "up\nup\n", 30)
    process.end(0.5 if is_hung else 30.0)
    assert process.exit_code == (-9 if is_hung else -15)
    wait_until(
        lambda: all(
            child.status() == psutil.STATUS_ZOMBIE
            for child in psutil.process_iter()
            if os.getpgid(child.pid) == process.pid
        ),
        10,
    )


def test_a_process_that_is_not_ready_in_time_is_named(tmp_path):
    process = start(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(ProcessExitedError, match="the clock is not ready after 0 s, see"):
        process.wait_until_ready(lambda: False, 0.2)
    process.kill()
    with pytest.raises(ProcessExitedError, match="the clock exited with code -9"):
        process.wait_until_ready(lambda: False, 30)


def test_a_program_that_cannot_be_started_is_named(tmp_path):
    process = ManagedProcess("clock", ["/nonexistent/clock"], tmp_path / "clock.log")
    with pytest.raises(StorageError):
        process.start()
    assert not process.is_running
    process.end()
