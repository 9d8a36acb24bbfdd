"""One real launcher (Prefect server and runner) for all end-to-end tests, in a home of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis import models
from lachesis.prefect_api import server_file
from lachesis.supervision.process import free_ports
from tests.endpoint import Endpoint, serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home in which the warm-started tiny model is; made once, also for several workers."""
    base = tmp_path_factory.getbasetemp()
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    models.build(models.Recipe(), home)
    return home


@pytest.fixture(scope="session")
def new_home(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A factory of homes that have the model already."""

    def make() -> Path:
        home = tmp_path_factory.mktemp("home")
        (home / "models").symlink_to(tiny_model / "models")
        return home

    return make


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the environment `calm`: the sums, no faster than other tests beside it can bear."""
    source = (ROOT / "environments" / "arithmetic.py").read_text()
    for old, new in (
        ("import random", "import asyncio\nimport random"),
        ('name = "arithmetic"', 'name = "calm"'),
        ("        if not self.queue:", "        await asyncio.sleep(0.1)\n        if not self.queue:"),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    folder = tmp_path_factory.mktemp("environments")
    (folder / "calm.py").write_text(source)
    return str(folder)


@pytest.fixture(scope="session")
def endpoint() -> Iterator[Endpoint]:
    """Where the served home's inference tests ask models by name."""
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def served_home(new_home: Callable[[], Path], endpoint: Endpoint) -> Iterator[Path]:
    """A home whose launcher runs; it is told to end by SIGTERM and leaves nothing behind."""
    home = new_home()
    env = {
        **os.environ,
        "LACHESIS_HOME": str(home),
        "LACHESIS_MAX_RUNS": "3",
        "OPENAI_BASE_URL": endpoint.url,
        "OPENAI_API_KEY": endpoint.key,
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
        "LACHESIS_MONITOR_INTERVAL_S": "3600",  # the tests ask for ticks themselves
    }
    command = [sys.executable, "-m", "deployments.up", "--port", str(free_ports(1)[0])]
    with (home / "launcher.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + 120
    while not server_file(home).exists():
        assert process.poll() is None, (home / "launcher.log").read_text()
        assert time.monotonic() < until
        time.sleep(0.1)
    yield home
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 0, (home / "launcher.log").read_text()
    assert _processes_of(home) == {}


@pytest.fixture(autouse=True)
def in_served_home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test calls itself uses the served home too."""
    if "served_home" in request.fixturenames:
        monkeypatch.setenv("LACHESIS_HOME", str(request.getfixturevalue("served_home")))


@pytest.fixture(scope="session")
def cli(served_home: Path) -> Callable[..., Any]:
    """Run `lachesis ... --json` and give its answer; `expect` is the exit code."""

    def run(*words: str, expect: int = 0, timeout: float = 280, **env: str) -> Any:
        command = [sys.executable, "-m", "lachesis.cli.main", *words, "--json"]
        env = {**os.environ, "LACHESIS_HOME": str(served_home), **env}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=env)
        assert done.returncode == expect, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def agent(served_home: Path) -> Callable[..., Any]:
    """One tool call by an agent's process, which is killed after it; see agent.py."""

    def run(transport: str, tool: str, place: dict[str, str], /, **arguments: Any) -> Any:
        env = {**os.environ, **place, "LACHESIS_HOME": str(served_home), "LACHESIS_SESSION": f"agent-{transport}"}
        command = [sys.executable, str(Path(__file__).with_name("agent.py")), transport, tool, json.dumps(arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=env)
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        assert "code" not in answer, answer
        return answer

    return run


@pytest.fixture(scope="session")
def processes_of() -> Callable[[Path], dict[int, str]]:
    return _processes_of


@pytest.fixture(scope="session")
def wait_ended(served_home: Path) -> Callable[[str], None]:
    """Wait for the end of a run in its record, which costs less than an agent that asks again and again."""

    def wait(run_id: str) -> None:
        file = served_home / "runs" / run_id / "run.json"
        _wait_until(lambda: json.loads(file.read_text())["ended_at"], 500, f"the end of run {run_id}")

    return wait


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Any]:
    return _wait_until


def _processes_of(home: Path) -> dict[int, str]:
    """Every living process that was started with this home, and its command."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # Services do not all inherit LACHESIS_HOME, but their working folder or command lies in it.
            text = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes() + os.readlink(folder / "cwd").encode()
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if str(home).encode() in text and state != "Z" and int(folder.name) != os.getpid():
            found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def _wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < until, f"{what} has not happened in {timeout_s} s"
        time.sleep(0.5)
    return value
