"""Fixtures: a home of its own, free ports, real child processes, a random tiny model and a real
engine that serves it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from xdist.scheduler import LoadScopeScheduling

from lachesis.base.http_client import get_tls_context
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.tiny_model import build
from tests.patience import deadline
from tests.prefect_server import empty_database  # noqa: F401
from tests.served import endpoint, new_home, schemas, share_schemas, tiny_model  # noqa: F401

# what all tests import stays; looking through it for garbage takes half of the time
gc.disable()
# a shell's background job ignores it, and so would children
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["TINKER_TELEMETRY"] = "0"
# more threads than cores, of several engines, wait for each other twenty times longer
os.environ["OMP_NUM_THREADS"] = "1"
# an accidental server fails instead of starting
os.environ["PREFECT_SERVER_EPHEMERAL_ENABLED"] = "false"
# the developer's keys stay where they are
os.environ["HERMES_HOME"] = "/nonexistent"
os.environ["PYTHON_KEYRING_BACKEND"] = "keyring.backends.null.Keyring"
TOKEN = "tml-test"
SAME_WORKER = {
    "tests/e2e/test_monitoring.py": "tests/e2e/test_agents.py",
    "tests/e2e/test_mixture.py": "tests/e2e/test_lifecycle.py",
    "tests/e2e/test_prefect_pages.py": "tests/e2e/test_lifecycle.py",
    "tests/e2e/test_deployments.py": "tests/e2e/test_lifecycle.py",
    "tests/prefect_client/test_registered_deployments.py": "tests/prefect_client/test_runner.py",
    "tests/prefect_client/test_worker.py": "tests/prefect_client/test_runner.py",
    "tests/trainer/test_pushed_weights.py": "tests/trainer/test_weights.py",
}
"""Modules that run in the worker of another module, because a launcher or a training of their own
costs a minute.
"""
# These share the engine of a worker in the same way; each further one takes five seconds of a core.
SAME_WORKER |= {
    f"tests/engine/test_{name}.py": "tests/engine/test_contract.py"
    for name in ("model_thread", "questions", "sampling", "training_contract")
} | {
    f"tests/{name}.py": "tests/inference_server/test_answers.py"
    for name in (
        "inference_server/test_fuzz",
        "inference_server/test_parameters",
        "supervision/test_leftovers",
        "trainer/test_accounts",
        "trainer/test_checkpoint_saving",
        "trainer/test_failed_steps",
        "trainer/test_loop",
        "trainer/test_recompute_logprobs",
        "trainer/test_sft_examples",
        "trainer/test_trained_model",
        "trainer/test_trainer_process",
        "weight_agreement/test_at_weight_sync",
    )
}


class ScopeScheduling(LoadScopeScheduling):
    """Give a worker whole modules, and those of `SAME_WORKER` together."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return SAME_WORKER.get(scope, scope)


def pytest_collection_finish() -> None:
    """Collect the garbage of the tests only."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)  # there is none with `-p no:xdist`
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ScopeScheduling | None:
    """Use this scheduling where `--dist loadscope` asks for the one that it extends."""
    return ScopeScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(autouse=True)
def clean_environment(
    tmp_path_factory: pytest.TempPathFactory,
    schemas: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Every test has its own home and none of the developer's keys."""
    home = tmp_path_factory.mktemp("home")
    share_schemas(home, schemas)
    for name in list(os.environ):
        if name.startswith(("TINKER_API", "TINKER_BASE", "WANDB_", "PREFECT_API", "LACHESIS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LACHESIS_HOME", str(home))
    # What needs a server is refused, unless a test starts one.
    monkeypatch.setenv("LACHESIS_NO_SERVE", "1")
    return home


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A two-layer model with random weights."""
    return str(
        build.ensure_tiny_model(build.TinyModelRecipe(steps=0), tmp_path_factory.mktemp("random"))
    )


@dataclass
class RunningEngine:
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
    started: list[subprocess.Popen[bytes]] = []

    def start(model: str, store: Path | None = None, further: Sequence[str] = ()) -> RunningEngine:
        folder = tmp_path_factory.mktemp("engine")
        store = store or folder / "store"
        port = reserve_free_ports(1)[0]
        log = folder / "engine.log"
        command = [
            sys.executable,
            "-m",
            "lachesis.engine",
            "--model",
            model,
            "--port",
            str(port),
            "--store",
            str(store),
        ]
        command += [part for name in further for part in ("--model", name)]
        with log.open("wb") as stream:
            env = {**os.environ, "LACHESIS_ENGINE_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}
            process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=env, start_new_session=True
            )
        started.append(process)
        url = f"http://127.0.0.1:{port}"
        wait_http(f"{url}/api/v1/healthz", process, headers={"X-API-Key": TOKEN})
        return RunningEngine(url, model, process, log, store)

    yield start
    for process in started:
        end(process)


@pytest.fixture(scope="session")
def engine(start_engine: Callable[..., RunningEngine], random_model: str) -> RunningEngine:
    """One engine for all tests that do not restart it."""
    return start_engine(random_model)


def wait_http(
    url: str, process: subprocess.Popen[bytes], timeout_s: float = 60, **options: object
) -> None:
    until = deadline(timeout_s)
    while time.monotonic() < until:
        assert process.poll() is None, f"the process has ended with {process.returncode}"
        try:
            if (
                httpx.get(url, trust_env=False, verify=get_tls_context(), **options).status_code
                == 200
            ):  # type: ignore[arg-type]
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{url} is not ready after {timeout_s} s")


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[str]:
    """A real Atropos API; its address."""
    with api_process(tmp_path) as (url, _):
        yield url


@contextlib.contextmanager
def api_process(
    folder: Path, *flags: str, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = port or reserve_free_ports(1)[0]
    with (folder / "api.log").open("ab") as stream:
        command = [sys.executable, "-m", "lachesis.rollout_api.routes", "--port", str(port), *flags]
        process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
    try:
        wait_http(f"http://127.0.0.1:{port}/", process)
        yield f"http://127.0.0.1:{port}", process
    finally:
        end(process)
