"""Ports, clocks, reboots and databases."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lachesis.monitor.tick import Monitor
from lachesis.prefect_client.resources import PrefectApi
from tests.faults.struck_home import INTERVAL, StruckHome, stranger_with_the_numbers_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]


def test_a_port_is_taken_between_choice_and_use(served, row):
    run = served.start()
    served.wait(
        lambda: "trainer" not in run.record.services and _port(run),
        60,
        "the choice of ports",
        0.005,
    )
    port = _port(run)
    thief = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); "
            f"time.sleep(600)",
        ]
    )
    try:
        record = run.ended()
        assert record.status == "failed"
        assert f"config: the inference server cannot listen on 127.0.0.1:{port}" in (
            record.error or ""
        )
        assert thief.poll() is None
        run.resume()
        served.current = run
    finally:
        thief.kill()
        thief.wait()
    row(
        fault="port taken",
        phase="starting",
        expected="failed",
        seen="failed: config; resumed",
        kept=run.kept(),
    )


def _port(run):
    text = run.dir.find_effective_config().read_text()
    found = [
        line.split(":")[-1].split("/")[0]
        for line in text.splitlines()
        if "base_url" in line and "127.0.0.1" in line
    ]
    return int(found[0]) if found and found[0].isdigit() else None


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler to make the clock of this case with"
)
def test_the_clock_jumps(served, tmp_path, row):
    """By a day forth, then to a day back, for launcher, server, runner and flow; the run may take
    an hour.
    """
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(library), str(Path(__file__).with_name("clock.c"))],
        check=True,
    )
    offset.write_text("0")
    served.stop_serving()
    served.serve(LD_PRELOAD=str(library), CLOCK_OFFSET_FILE=str(offset))
    try:
        run = served.start(**{"limits.max_hours": 1.0})
        run.reach("running")
        for jump in (86400, -86400):
            offset.write_text(str(jump))
            run.advances()
            assert run.record.status == "running"
            note = json.loads(run.dir.record.read_text())
        assert run.stop().status == "stopped"
        assert run.record.ended_at is not None
        assert run.record.ended_at < note["started_at"], "the flow lives a day before it began"
    finally:
        served.end_all_runs()
        served.stop_serving()
    row(
        fault="clock jumps by days",
        phase="running",
        expected="trains on",
        seen="trains on",
        kept=run.kept(),
    )


def test_the_host_reboots(served, row):
    """Every process is gone at once, and strangers have their numbers."""
    run = served.take("running")
    run.reach("running")
    made = run.steps()[-1]
    power_off(served)
    run.gone()
    with stranger_with_the_numbers_of(run) as stranger:
        served.serve()
        record = run.ended()
        assert record.status == "failed"
        Monitor(served.store).tick()
        served.fix()
        assert stranger.poll() is None
        assert run.kept() > made - INTERVAL - 1
        run.resume()
        served.current = run
        assert stranger.poll() is None
    row(
        fault="host reboots",
        phase="running",
        expected="failed",
        seen=f"failed: {(record.error or '')[:60]}; resumed",
        kept=run.kept(),
    )


def test_a_crashed_run_goes_on_by_itself_after_a_reboot(served, row):
    """With limits.on_crash=resume, at the first look of the monitor."""
    run = served.start(**{"limits.on_crash": "resume"})
    run.reach("running")
    power_off(served)
    run.gone()
    served.serve()
    served.wait(
        lambda: Monitor(served.store).tick() and run.record.auto_resumes,
        60,
        "the monitor's resume",
        1,
    )
    run.advances()
    assert (run.record.attempt, run.record.auto_resumes) == (2, 1)
    served.current = run
    row(
        fault="host reboots",
        phase="running",
        expected="goes on by itself",
        seen="resumed by the monitor",
        kept=run.kept(),
    )


def power_off(served):
    """Every process at once."""
    for pid in served.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if served.launcher is not None:
        served.launcher.wait()
    served.launcher = None


def test_the_database_is_locked(served, row):
    run = served.take("running")
    run.reach("running")
    base = sqlite3.connect(served.home / "prefect" / "prefect.db", isolation_level=None)
    base.execute("BEGIN EXCLUSIVE")
    begun = time.monotonic()
    run.advances()
    time.sleep(max(0.0, 20 - (time.monotonic() - begun)))
    base.execute("ROLLBACK")
    base.close()
    run.advances()
    served.current = run
    row(
        fault="database locked 20 s",
        phase="running",
        expected="trains on",
        seen="trains on",
        kept=run.kept(),
    )


def test_the_database_is_lost(served, row):
    """The server begins with an empty one; the run trains on, can be stopped, and resumed after the
    launcher's new start.
    """
    run = served.take("running")
    run.reach("running")
    for file in (served.home / "prefect").glob("prefect.db*"):
        file.unlink()
    served.strike(served.part("server"), signal.SIGKILL)
    served.wait(
        lambda: psutil.pid_exists(served.part("server")) and PrefectApi().is_healthy(),
        90,
        "a new server",
        0.5,
    )
    run.advances()
    assert run.seen().status == "running"
    record = run.stop()
    assert record.status == "stopped"
    assert run.kept() == run.steps()[-1]
    served.stop_serving()
    served.serve()
    run.resume()
    served.current = run
    row(
        fault="database lost",
        phase="running",
        expected="trains on",
        seen="trains on; stopped; resumed",
        kept=run.kept(),
    )


def test_a_launcher_ends_with_the_process_that_needs_it(new_home, row):
    """The demo may be killed without a word; its server and runner notice."""
    home = new_home()
    place = StruckHome(home)
    script = (
        "import time; from lachesis.prefect_client.background_serve import LauncherProcess; "
        "LauncherProcess().__enter__(); print('up', flush=True); time.sleep(600)"
    )
    env = {**os.environ, "LACHESIS_HOME": str(home)}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            assert len(place.processes()) >= 3
        finally:
            process.kill()
    place.wait(lambda: not place.processes(), 60, "the end of every process")
    row(
        fault="process behind a launcher SIGKILL",
        phase="idle",
        expected="launcher ends",
        seen="nothing left",
        kept="",
    )
