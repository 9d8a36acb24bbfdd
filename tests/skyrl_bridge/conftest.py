"""A bridge before an engine that deviates from the protocol in every known way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lachesis.supervision.services.ports import reserve_free_ports
from tests.conftest import TOKEN, end, wait_http

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Bridge:
    url: str
    model: str
    process: subprocess.Popen[bytes]
    upstream: subprocess.Popen[bytes]
    upstream_url: str
    store: Path
    log: Path


# Servers made of parts of the engine import them as quickly as the engine's own program does.
SERVER = """
import runpy, sys
from lachesis.models.transformers_import import leave_out_bitsandbytes

leave_out_bitsandbytes()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def start_server(module: str, log: Path, *options: str) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a server on a free port, and return its address when it is healthy."""
    port = reserve_free_ports(1)[0]
    env = {**os.environ, "LACHESIS_ENGINE_TOKEN": TOKEN, "LACHESIS_BACKEND_KEY": TOKEN}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, module, "--port", str(port), *options],
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_http(f"{url}/api/v1/healthz", process, headers={"X-API-Key": TOKEN})
    except AssertionError as error:
        raise AssertionError(f"{error}: {log.read_text()[-2000:]}") from error
    return url, process


@pytest.fixture(scope="session")
def start_bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Bridge]]:
    """A factory of bridges, each before an engine of its own or before that of another one."""
    started: list[subprocess.Popen[bytes]] = []

    def start(model: str, before: Bridge | None = None) -> Bridge:
        folder = tmp_path_factory.mktemp("bridge")
        if before is None:
            options = ("--model", model, "--store", str(folder / "upstream"))
            upstream_url, upstream = start_server(
                "tests.skyrl_bridge.older_engine", folder / "upstream.log", *options
            )
            started.append(upstream)
            store = folder / "store"
        else:
            upstream_url, upstream, store = before.upstream_url, before.upstream, before.store
        options = ("--model", model, "--upstream", upstream_url, "--store", str(store))
        log = folder / "bridge.log"
        url, process = start_server("lachesis.skyrl_bridge", log, *options, "--rank", "8")
        started.append(process)
        return Bridge(url, model, process, upstream, upstream_url, store, log)

    yield start
    for process in reversed(started):
        end(process)


@pytest.fixture(scope="session")
def bridge(start_bridge: Callable[..., Bridge], random_model: str) -> Bridge:
    """One bridge for all tests that do not end it or its engine."""
    return start_bridge(random_model)
