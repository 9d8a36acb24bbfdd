"""What a look at a run may write, and who is told to end when the server does not answer."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from deployments import serve
from lachesis.base import managed_process
from lachesis.base.errors import ProcessExitedError, ServerDownError
from lachesis.base.managed_process import ManagedProcess
from lachesis.base.timestamps import now_iso
from lachesis.checkpoints.manifests import Checkpoints, Manifest
from lachesis.launch.resume import make_next_attempt_changes
from lachesis.prefect_client import refresh, stop
from lachesis.prefect_client.serve_info import RUNNER, SERVER
from lachesis.reporting.run_schemas import build_run_status
from lachesis.reporting.run_view import RunView
from lachesis.runs.end_causes import CAUSES, EndCause
from lachesis.runs.ending import end_run
from lachesis.runs.store import RunStore
from lachesis.supervision.leftovers import LAUNCHER_MARK_VARIABLE
from lachesis.supervision.process_marks import MARK_VARIABLE, build_mark
from lachesis.supervision.services.ports import reserve_free_ports
from tests.harness.home import make_record
from tests.harness.served_home import processes_under

RUN = "0123abcd"


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    found = RunStore(tmp_path)
    values = {
        "environment": "e",
        "environment_file": "e.py",
        "profile": "embedded",
        "base_model": "m",
        "flow_run_id": "f",
    }
    values |= {
        "total_steps": 100,
        "seed": 0,
        "wandb_project": "p",
        "wandb_run_name": "n",
        "status": "running",
    }
    found.create(make_record(**{"run_id": RUN, **values}))
    return found


def test_the_end_of_an_old_flow_run_says_nothing_about_the_next_attempt(store):
    """Somebody looks, another one writes the end and resumes the run, and the first one goes on
    with what it saw.
    """
    seen = store.load(RUN)
    end_run(store, store.load(RUN), EndCause.PERSON)
    store.update(RUN, **make_next_attempt_changes(store.load(RUN)))
    cancelled = {"state": {"type": "CANCELLED"}}
    assert refresh._refresh_from_server(store, seen, "u", cancelled).status == "pending"
    assert refresh._refresh_from_server(store, store.load(RUN), "u", cancelled).status == "pending"
    assert store.load(RUN).attempt == 2


@pytest.fixture
def sleeper():
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    yield process
    process.kill()
    process.wait()


def test_without_a_server_only_who_holds_the_run_is_told(store, sleeper):
    """The system may have given the flow's number to somebody else, while the reaper still ends the
    services.
    """
    store.update(RUN, flow_pid=sleeper.pid)
    with pytest.raises(ServerDownError):
        stop.cancel_run(store, store.load(RUN))
    assert store.load(RUN).stop_reason is None, "nobody was asked"
    assert not store.dir(RUN).stop_file.exists()
    with store.dir(RUN).hold_alive_lock():
        stop.cancel_run(store, store.load(RUN))
    assert sleeper.poll() is None
    assert store.dir(RUN).stop_file.exists()
    assert store.load(RUN).stop_reason == CAUSES[EndCause.PERSON].sentence


def test_a_status_counts_from_the_checkpoint_until_steps_are_made_again(store):
    folder = store.dir(RUN)
    folder.checkpoints.mkdir(exist_ok=True)
    Checkpoints(folder.checkpoints).write(
        Manifest(step=25, state="tinker://s", sampler_weights="tinker://w")
    )
    steps = [
        {"step": step, "time": time.time() - 100 + step, "reward/mean": 0.5}
        for step in range(1, 49)
    ]

    def step_of(record):
        return build_run_status(RunView(record, folder, steps)).progress.step

    first = store.load(RUN)
    assert step_of(first) == 48
    again = first.model_copy(update={"attempt": 2, "queued_at": now_iso()})
    assert step_of(again) == 25
    steps[25:] = [{"step": 26, "time": time.time() + 1, "reward/mean": 0.5}]
    assert step_of(again) == 26


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(600)"
)


def adopt(name, process, log, *command):
    """A part of the launcher that runs already, with the command that would start it again."""
    child = ManagedProcess(f"Prefect {name}", command, log)
    child.process = process
    return child


def test_a_launcher_that_ends_leaves_no_run_whatever_its_runner_does(tmp_path, monkeypatch):
    """The runner does not hear it, and neither does a process of one of its runs, nor that of its
    flow.
    """
    folder = tmp_path / "runs" / RUN
    folder.mkdir(parents=True)
    stubborn = [sys.executable, "-c", STUBBORN]
    env = {**os.environ, MARK_VARIABLE: build_mark(folder)}
    run = subprocess.Popen(stubborn, env=env, stdout=subprocess.PIPE, start_new_session=True)
    env = {**os.environ, LAUNCHER_MARK_VARIABLE: build_mark(tmp_path)}
    flow = subprocess.Popen(
        [*stubborn, "prefect.engine"], env=env, stdout=subprocess.PIPE, start_new_session=True
    )
    runner = subprocess.Popen(stubborn, stdout=subprocess.PIPE, start_new_session=True)
    for process in (run, flow, runner):
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
    monkeypatch.setattr(serve, "RUNS_END_TIMEOUT_S", 0.5)
    monkeypatch.setattr(serve, "FLOW_END_TIMEOUT_S", 0.5)
    launcher = serve.Launcher(tmp_path, None)
    launcher.children = {RUNNER: adopt("runner", runner, tmp_path / "runner.log")}
    launcher._end_all()
    assert runner.returncode == -9
    assert not psutil.pid_exists(run.pid)
    assert not psutil.pid_exists(flow.pid)
    for process in (run, flow, runner):
        with process:  # closes its pipe
            pass


WAITS = """
import pathlib, signal, sys, time
from tests.harness.home import make_record
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("up", flush=True)
while not (told and pathlib.Path(sys.argv[1]).exists()):
    time.sleep(0.05)
"""
SERVES = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"


def test_a_server_that_dies_while_the_runner_ends_is_started_again(tmp_path, monkeypatch):
    """The runner tells it how its runs ended, and would ask for minutes."""
    monkeypatch.setattr(managed_process, "RESTART_PAUSES_S", (0.0,))
    there = tmp_path / "there"
    dead = subprocess.Popen(["true"], start_new_session=True)
    dead.wait()
    server = adopt(
        "server", dead, tmp_path / "server.log", sys.executable, "-c", SERVES, str(there)
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(there)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert runner.stdout is not None
    with runner.stdout as lines:
        assert lines.readline() == b"up\n"
    launcher = serve.Launcher(tmp_path, None)
    launcher.children = {SERVER: server, RUNNER: adopt("runner", runner, tmp_path / "runner.log")}
    launcher._end_all()
    assert runner.returncode == 0
    assert server.exit_code == -15


def test_a_group_of_zombies_ends_the_launcher_in_order(tmp_path, monkeypatch):
    """On macOS a signal to it is not permitted."""

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    process = subprocess.Popen(["true"], start_new_session=True)
    monkeypatch.setattr(os, "killpg", refuse)
    launcher = serve.Launcher(tmp_path, None)
    launcher.children = {SERVER: adopt("server", process, tmp_path / "server.log")}
    launcher._end_all()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "which PREFECT_API_URL names, cannot be used: it does not respond (ConnectError)"),
        (["--port", "4555"], "--port is 4555, but PREFECT_API_URL names the server"),
    ],
)
def test_a_server_elsewhere_that_cannot_be_used_is_named_in_one_line(tmp_path, options, message):
    """No runner is started that would only print a traceback."""
    url = f"http://127.0.0.1:{reserve_free_ports(1)[0]}/api"
    done = subprocess.run(
        [sys.executable, "-m", "deployments.serve", *options],
        env={**os.environ, "PREFECT_API_URL": url, "LACHESIS_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert message in line
    assert url in line
    assert not (tmp_path / "logs" / "runner.log").exists()


def test_a_server_that_cannot_start_is_named_and_the_runner_ends(tmp_path):
    """The runner was started together with it, and waits for it."""
    database = f"sqlite+aiosqlite:///{tmp_path / 'no such folder' / 'prefect.db'}"
    done = subprocess.run(
        [sys.executable, "-m", "deployments.serve"],
        env={
            **os.environ,
            "LACHESIS_HOME": str(tmp_path),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "process_exited: the Prefect server exited with code" in done.stderr
    assert (tmp_path / "logs" / "runner.log").exists()
    assert processes_under(tmp_path) == {}


def test_a_runner_is_not_waited_for_without_its_server(tmp_path):
    """It waits for the server itself, which nobody would start again."""
    dead = subprocess.Popen(["false"])
    dead.wait()
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    runner = adopt(
        "runner", subprocess.Popen(sleeps, start_new_session=True), tmp_path / "runner.log"
    )
    launcher = serve.Launcher(tmp_path, None)
    launcher.children = {SERVER: adopt("server", dead, tmp_path / "server.log"), RUNNER: runner}
    try:
        with pytest.raises(ProcessExitedError, match="the Prefect server exited with code 1"):
            runner.wait_until_ready(lambda: launcher._is_ready(runner), 30)
    finally:
        runner.kill()
