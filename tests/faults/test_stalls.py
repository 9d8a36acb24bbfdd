"""A run that stands still: the part is named, at once and wherever the run is shown."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lachesis.agent_tools.session import AgentSession
from lachesis.agent_tools.tool_definition import CallContext
from lachesis.agent_tools.tools import TOOLS
from lachesis.monitor.tick import Monitor
from tests.harness.processes import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]
STALL_AFTER_S = 5
STEADY = (Path(__file__).parent / "steady.py").read_text().splitlines()


def lachesis(served, *words):
    command = [sys.executable, "-m", "lachesis.cli.main", *words, "--json"]
    ended = subprocess.run(command, env=served.env(), capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def find_stall(served, run):
    Monitor(served.store).tick()
    return run.record.stall


@pytest.mark.parametrize(
    ("mode", "function"), [("blocks", "_verify_slowly"), ("locks", "_verify_by_pattern")]
)
def test_a_blocked_event_loop_is_named_with_its_line(served, row, mode, function):
    """`blocks` sleeps without an await; `locks` keeps all threads of the process from running."""
    run = served.start(mode=mode, stall_after_s=STALL_AFTER_S)
    run.reach("running")
    session = AgentSession("matrix")
    context = CallContext(session)

    def check_status():
        return TOOLS["rl_check_status"].run_safely(context, {"run_id": run.run_id})[0]

    assert "rate_limited" not in check_status()
    blocked_at = time.monotonic()
    stall = served.wait(lambda: find_stall(served, run), 90, "the stall", poll_s=1.0)
    noticed_s = time.monotonic() - blocked_at
    line = next(
        number for number, text in enumerate(STEADY, 1) if f"  # where `{mode}` stands" in text
    )
    served.wait(
        lambda: f"steady.py:{line}" in (find_stall(served, run) or stall)["evidence"],
        30,
        "the line",
        poll_s=1.0,
    )
    stall = run.record.stall
    assert stall is not None
    assert stall["part"] == "environment"
    assert "blocked for" in stall["evidence"]
    assert f"in {function}() at" in stall["evidence"]
    status = check_status()
    assert "rate_limited" not in status, "a stall is told at once"
    assert status["health"]["stalled"]["part"] == "environment"
    assert status["progress"]["eta_seconds"] is None
    assert "continues by itself" not in check_status()["message"]
    _check_shown(served, run)
    row(
        fault=f"the verifier {mode} the event loop",
        phase="running",
        expected="stalled in environment, its line, everywhere",
        seen=stall["evidence"].rpartition(" at ")[2].partition(";")[0].rpartition("/")[2],
        noticed=f"{noticed_s:.0f}",
        kept=run.kept(),
    )
    run.stop(now=True)


def _check_shown(served, run):
    """Each place that shows the word shows the stall."""
    (entry,) = [one for one in lachesis(served, "runs")["runs"] if one["run_id"] == run.run_id]
    assert entry["stalled"].startswith("stalled in environment since ")
    status = lachesis(served, "status", run.run_id)
    assert status["health"]["stalled"]["part"] == "environment"
    (page, *_) = lachesis(served, "report", run.run_id)["files"]
    report = Path(page).read_text()
    assert "It stands still." in report
    assert "Stalled in environment since" in report
    assert str(Path(__file__).parent) not in report, "no folder of this machine"
