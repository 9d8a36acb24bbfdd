"""What no text of a process shows of its secrets."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lachesis.base.errors import ConfigError
from lachesis.base.secrets import redact_log_records

ROOT = Path(__file__).resolve().parents[2]
SECRET = "marked-0a1b2c3d"
CHATTY = """
import os, sys
from deployments.log_capture import capture_output
capture_output("chatty", max_bytes=1_000_000)
os.write(1, b"half of it: marked-0a1b"); os.write(2, b"2c3d, and the rest\\n")
for number in range(int(sys.argv[1])):
    print(f"line {number:05}", "-" * 50)
os.system("echo a child says $CHATTY_TOKEN >&2")
raise ValueError(os.environ["CHATTY_TOKEN"])
"""


@pytest.fixture
def redacted(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    made = logging.getLogRecordFactory()
    redact_log_records.cache_clear()
    redact_log_records()
    yield
    logging.setLogRecordFactory(made)
    redact_log_records.cache_clear()


def chatter(home, lines):
    """The log, and what was before it, of a process that says this many lines and dies of an
    error.
    """
    (home / "logs").mkdir()
    env = {**os.environ, "LACHESIS_HOME": str(home), "CHATTY_TOKEN": SECRET}
    ended = subprocess.run(
        [sys.executable, "-c", CHATTY, str(lines)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert ended.stdout + ended.stderr == b""
    log, before = home / "logs" / "chatty.log", home / "logs" / "chatty.log.1"
    return log.read_text(), before.read_text() if before.exists() else ""


@pytest.mark.usefixtures("redacted")
def test_no_log_record_holds_a_secret(caplog):
    """Neither in its text nor in its arguments or its traceback; others stay as they are."""
    log = logging.getLogger("lachesis.any")
    log.warning("%s of %s", 3, SECRET)
    log.warning("%s of %d", 3, 4)
    try:
        raise ConfigError(f"refused: {SECRET}")
    except ConfigError:
        log.exception("it failed")
    assert [record.getMessage() for record in caplog.records] == ["3 of ***", "3 of 4", "it failed"]
    assert caplog.records[1].args == (3, 4)
    assert "refused: ***" in caplog.text
    assert SECRET not in caplog.text


def test_a_kept_log_holds_all_but_secrets(tmp_path):
    """Also what its children say, and the traceback that it dies of."""
    log, before = chatter(tmp_path, 100)
    assert before == ""
    assert "half of it: ***, and the rest\n" in log
    assert [f"line {number:05}" in log for number in range(100)] == [True] * 100
    assert "a child says ***\n" in log
    assert log.endswith("ValueError: ***\n")
    assert SECRET not in log


def test_a_kept_log_is_bounded(tmp_path):
    log, before = chatter(tmp_path, 20_000)
    assert 500_000 < len(log) + len(before) <= 1_000_000
    assert log.endswith("ValueError: ***\n")
    assert "line 19999" in log + before
