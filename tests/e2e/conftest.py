"""What end-to-end tests do in the served home."""

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

from tests.endpoint import Endpoint
from tests.patience import deadline
from tests.prefect_server import give_database
from tests.served import processes_under, serve_home

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the environment `calm`: the sums, no faster than other tests beside it can
    bear.
    """
    source = (ROOT / "environments" / "arithmetic.py").read_text()
    for old, new in (
        ('name = "arithmetic"', 'name = "calm"'),
        (
            "        if not self.queue:",
            "        await asyncio.sleep(0.1)\n        if not self.queue:",
        ),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    folder = tmp_path_factory.mktemp("environments")
    (folder / "calm.py").write_text(source)
    return str(folder)


@pytest.fixture(autouse=True)
def in_served_home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test calls itself uses the served home too."""
    if "served_home" in request.fixturenames:
        monkeypatch.setenv("LACHESIS_HOME", str(request.getfixturevalue("served_home")))


@pytest.fixture(scope="package")
def served_home(
    new_home: Callable[[], Path], endpoint: Endpoint, calm: str, empty_database: Path
) -> Iterator[Path]:
    """A home whose launcher runs until the last test of this folder; an idle one takes a tenth of a
    core from the others. Its forms offer the environment `calm` too.
    """
    home = new_home()
    give_database(home / "prefect", empty_database)
    yield from serve_home(home, endpoint, LACHESIS_ENVIRONMENTS=calm)


@pytest.fixture(scope="package")
def cli(served_home: Path) -> Callable[..., Any]:
    """Run `lachesis ... --json` and give its answer; `expect` is the exit code."""

    def run(*words: str, expect: int = 0, timeout: float = 280, **env: str) -> Any:
        command = [sys.executable, "-m", "lachesis.cli.main", *words, "--json"]
        env = {**os.environ, "LACHESIS_HOME": str(served_home), **env}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, env=env
        )
        assert done.returncode == expect, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="package")
def agent(served_home: Path) -> Callable[..., Any]:
    """One tool call by an agent's process, which is killed after it; see agent.py."""

    def run(transport: str, tool: str, place: dict[str, str], /, **arguments: Any) -> Any:
        env = {
            **os.environ,
            **place,
            "LACHESIS_HOME": str(served_home),
            "LACHESIS_SESSION": f"agent-{transport}",
        }
        command = [
            sys.executable,
            str(Path(__file__).with_name("agent.py")),
            transport,
            tool,
            json.dumps(arguments),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, check=False, env=env
        )
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        assert "code" not in answer, answer
        return answer

    return run


@pytest.fixture(scope="session")
def processes_of() -> Callable[[Path], dict[int, str]]:
    return processes_under


@pytest.fixture(scope="package")
def wait_ended(served_home: Path) -> Callable[[str], None]:
    """Wait for the end of a run in its record, which costs less than an agent that asks again and
    again.
    """

    def wait(run_id: str) -> None:
        file = served_home / "runs" / run_id / "run.json"
        _wait_until(
            lambda: json.loads(file.read_text())["ended_at"], 500, f"the end of run {run_id}"
        )

    return wait


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Any]:
    return _wait_until


def _wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    until = deadline(timeout_s)
    while not (value := condition()):
        assert time.monotonic() < until, f"{what} has not happened in {timeout_s} s"
        time.sleep(0.5)
    return value
