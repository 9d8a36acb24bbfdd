"""A child of foreign code ends, whatever it does."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from lachesis.base.bounded_child import OUTPUT_TAIL_BYTES, ChildResult, run_bounded
from lachesis.base.errors import EnvironmentLoadError
from lachesis.environment_catalog import lookup
from tests.environment_check.test_check import lachesis
from tests.patience import deadline

BASE = "from atroposlib.envs.base import BaseEnv\nclass A(BaseEnv):\n    pass\n"


def run(code: str, *, timeout_s: float = 60.0, request: bytes = b"") -> tuple[ChildResult, float]:
    started = time.monotonic()
    ended = run_bounded(
        [sys.executable, "-S", "-c", code],
        input_bytes=request,
        env=dict(os.environ),
        timeout_s=timeout_s,
    )
    return ended, time.monotonic() - started


def test_a_child_that_ends_is_told_with_its_last_words() -> None:
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
def test_output_without_end_is_cut_off(code: str) -> None:
    ended, took_s = run(code)
    assert (ended.end_reason, ended.exit_code) == ("output", -9)
    assert len(ended.output) <= OUTPUT_TAIL_BYTES
    assert len(ended.last_lines(3)) < 2000
    assert took_s < 30


def test_a_child_that_never_ends_is_ended_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    sleeps = (
        f"import os, time\nif os.fork() == 0: open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
    )
    ended, _ = run(sleeps + "os.close(1)\nos.close(2)\ntime.sleep(600)", timeout_s=2)
    assert (ended.end_reason, ended.exit_code) == ("time", -9)
    until = deadline(10)
    while (
        psutil.pid_exists(number := int(pid.read_text()))
        and psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    ):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_grandchild_that_holds_the_output_open_is_not_waited_for() -> None:
    ended, took_s = run(
        "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nprint('done', "
        "flush=True)\nos._exit(0)"
    )
    assert (ended.end_reason, ended.exit_code, ended.output) == ("exit", 0, "done\n")
    assert took_s < 30


def test_an_environment_that_reads_its_input_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text("name = input('your name? ')\n" + BASE)
    with pytest.raises(EnvironmentLoadError, match=r"EOFError at asks\.py:1: EOF when reading"):
        lookup.load_schema(lookup.find_environment("asks", [tmp_path]))


def test_a_check_of_a_file_that_prints_without_end_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("while True:\n    print('all work and no play')\n" + BASE)
    started = time.monotonic()
    code, found, said = lachesis("env", "check", "loud.py", home=tmp_path / "home", cwd=tmp_path)
    assert time.monotonic() - started < 60
    told = str(found or said)
    assert code == 1
    assert "because it printed more than 10 MB; its last line: 'all work and no play'" in told
    assert "Traceback" not in told + said
