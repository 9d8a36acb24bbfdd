"""Programs of ours in processes of their own, and applications in a thread of the test."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from lachesis.base.http_client import get_tls_context
from lachesis.base.http_guard import ASGIApp
from lachesis.supervision.services.ports import reserve_free_ports
from tests.harness.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "tml-test"


@contextlib.contextmanager
def run_program(
    command: Sequence[str], log: Path, ready_url: str, *, timeout_s: float = 60, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of our programs within the block, from its readiness on.

    Args:
        command: Its words.
        log: The file for what it prints; a failure to start shows its end.
        ready_url: The address that answers with 200 when the program is ready.
        timeout_s: The seconds that its start may take.
        **env: Further variables of the program.
    """
    process = start_program(command, log, **env)
    headers = {"X-API-Key": env.get("LACHESIS_ENGINE_TOKEN", TOKEN)}
    try:
        wait_http(ready_url, process, timeout_s, log=log, headers=headers)
        yield process
    finally:
        end(process)


def start_program(command: Sequence[str], log: Path, **env: str) -> subprocess.Popen[bytes]:
    """Start one of our programs in a session of its own, and return its process."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            cwd=ROOT, env={**os.environ, **env}, stdout=stream, stderr=stream,
            start_new_session=True,
        )  # fmt: skip


def wait_http(
    url: str,
    process: subprocess.Popen[bytes],
    timeout_s: float = 60,
    *,
    log: Path | None = None,
    **options: Any,
) -> None:
    """Wait until a program answers with 200."""

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(url, trust_env=False, verify=get_tls_context(), **options)
            return answer.status_code == 200
        return False

    wait_until(answers, timeout_s, url, poll_s=0.05, process=process, log=log)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass
class RunningEngine:
    """Hold an embedded engine that serves in a process of its own."""

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path
    store: Path
    token: str = TOKEN


@pytest.fixture(scope="session")
def start_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., RunningEngine]]:
    """A factory of real engines; what it has started is ended."""
    with contextlib.ExitStack() as programs:

        def start(
            model: str, store: Path | None = None, further: Sequence[str] = ()
        ) -> RunningEngine:
            folder = tmp_path_factory.mktemp("engine")
            store = store or folder / "store"
            process, url = programs.enter_context(
                run_tinker_server(
                    "lachesis.engine", folder / "engine.log", (model, *further), store
                )
            )
            return RunningEngine(url, model, process, folder / "engine.log", store)

        yield start


@contextlib.contextmanager
def run_tinker_server(
    module: str, log: Path, models: Sequence[str], store: Path, *options: str, **env: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server of the Tinker protocol within the block; its process and its address."""
    port = reserve_free_ports(1)[0]
    named = [word for model in models for word in ("--model", model)]
    command = [*run_as_module(module), "--port", str(port), "--store", str(store), *named, *options]
    url = f"http://127.0.0.1:{port}"
    env = {"LACHESIS_ENGINE_TOKEN": TOKEN, "LACHESIS_BACKEND_KEY": TOKEN, **env}
    ready = f"{url}/api/v1/healthz"
    with run_program(command, log, ready, timeout_s=120, HF_HUB_OFFLINE="1", **env) as process:
        yield process, url


def run_as_module(module: str) -> list[str]:
    """Return the words that run a module; one that is made of parts of the engine imports them as
    quickly as the engine's own program does.
    """
    code = (
        "import runpy, sys; from lachesis.models import transformers_import as quick; "
        "quick.leave_out_bitsandbytes(); "
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    is_quick = module.startswith("lachesis.engine")
    return [sys.executable, *(["-m", module] if is_quick else ["-c", code, module])]


@pytest.fixture(scope="session")
def engine(start_engine: Callable[..., RunningEngine], random_model: str) -> RunningEngine:
    """One engine for all tests that do not restart it."""
    return start_engine(random_model)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[str]:
    """A real Atropos API; its address."""
    with api_process(tmp_path) as (url, _):
        yield url


@contextlib.contextmanager
def api_process(
    folder: Path, *flags: str, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run the rollout API within the block; its address and its process."""
    port = port or reserve_free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "lachesis.rollout_api.routes", "--port", str(port), *flags]
    with run_program(command, folder / "api.log", f"{url}/") as process:
        yield url, process


@contextlib.contextmanager
def serve(app: ASGIApp, port: int | None = None) -> Iterator[str]:
    """The address of a real server of this application, which ends with the block."""
    port = port or reserve_free_ports(1)[0]
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, 30, "the start of the server", poll_s=0.02)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)
