"""One real launcher (Prefect server and runner) for all end-to-end tests of a worker, in a home of
its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from lachesis.prefect_client.serve_info import server_file
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.tiny_model import build
from tests.endpoint import Endpoint, serving
from tests.patience import deadline

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home in which the warm-started tiny model is; made once, also for several workers."""
    base = tmp_path_factory.getbasetemp()
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    build.ensure_tiny_model(build.TinyModelRecipe(), home)
    return home


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the schemas of environments are kept, for all homes and workers of a test run: learning
    one takes seconds.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "schemas"
    folder.mkdir(exist_ok=True)
    return folder


def share_schemas(home: Path, schemas: Path) -> None:
    """Let a home use the schemas that other tests have learnt. Their names depend on all that they
    depend on.
    """
    (home / "cache").mkdir(parents=True, exist_ok=True)
    (home / "cache" / "schemas").symlink_to(schemas)


@pytest.fixture(scope="session")
def new_home(
    tiny_model: Path, schemas: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Path]:
    """A factory of homes that have the model already."""

    def make() -> Path:
        home = tmp_path_factory.mktemp("home")
        (home / "models").symlink_to(tiny_model / "models")
        share_schemas(home, schemas)
        return home

    return make


@pytest.fixture(scope="session")
def endpoint() -> Iterator[Endpoint]:
    """Where the served home's inference tests ask models by name."""
    with serving() as server:
        yield server


def serve_home(home: Path, endpoint: Endpoint, **further_env: str) -> Iterator[Path]:
    """Serve this home with a launcher, which is told to end by SIGTERM and leaves nothing
    behind.
    """
    env = {
        **os.environ,
        "LACHESIS_HOME": str(home),
        "LACHESIS_MAX_RUNS": "3",
        "LACHESIS_NIGHTLY_ENVIRONMENTS": "arithmetic format_json",
        "OPENAI_BASE_URL": endpoint.url,
        "OPENAI_API_KEY": endpoint.key,
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
        "LACHESIS_MONITOR_INTERVAL_S": "3600",  # the tests ask for ticks themselves
        **further_env,
    }
    command = [sys.executable, "-m", "deployments.serve", "--port", str(reserve_free_ports(1)[0])]
    with (home / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
    until = deadline(120)
    while not server_file(home).exists():
        assert process.poll() is None, (home / "launcher.log").read_text()
        assert time.monotonic() < until
        time.sleep(0.1)
    yield home
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 0, (home / "launcher.log").read_text()
    left = processes_under(home)
    assert left == {}, left


def processes_under(home: Path) -> dict[int, str]:
    """Every living process that was started with this home, and its command."""
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # Services do not all inherit LACHESIS_HOME, but their working folder or command lies in
            # it.
            command = (folder / "cmdline").read_bytes()
            text = (
                (folder / "environ").read_bytes() + command + os.readlink(folder / "cwd").encode()
            )
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if str(home).encode() in text and state != "Z" and int(folder.name) != os.getpid():
            commands[int(folder.name)] = command.replace(b"\0", b" ").decode()
    return commands


@contextlib.contextmanager
def serve_surfaces(home: Path) -> Iterator[dict[str, dict[str, str]]]:
    """Run `lachesis mcp --http` and `lachesis api`, and yield the address and the token that an
    agent needs for each, by transport.
    """
    mcp_port, api_port = reserve_free_ports(2)
    env = {**os.environ, "LACHESIS_HOME": str(home)}
    processes = []
    for words in (["mcp", "--http", "--port", str(mcp_port)], ["api", "--port", str(api_port)]):
        command = [sys.executable, "-m", "lachesis.cli.main", *words]
        with (home / f"{words[0]}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    mcp_url, api_url = f"http://127.0.0.1:{mcp_port}", f"http://127.0.0.1:{api_port}"
    try:
        for url, process in ((f"{mcp_url}/mcp", processes[0]), (f"{api_url}/health", processes[1])):
            _wait_for_answer(url, process)
        token = (home / "token").read_text()
        yield {
            "mcp-http": {"URL": mcp_url, "TOKEN": token},
            "http": {"URL": api_url, "TOKEN": token},
        }
    finally:
        for process in processes:
            process.terminate()
            process.wait(10)


def _wait_for_answer(url: str, process: subprocess.Popen[bytes]) -> None:
    until = deadline(60)
    while True:
        assert process.poll() is None
        assert time.monotonic() < until
        try:
            httpx.get(url, trust_env=False)
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return
