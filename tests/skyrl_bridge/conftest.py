"""A bridge before an engine that deviates from the protocol in every known way."""

import contextlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.processes import run_tinker_server

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


@pytest.fixture(scope="session")
def start_bridge(tmp_path_factory):
    """A factory of bridges, each before an engine of its own or before that of another one."""
    with contextlib.ExitStack() as programs:

        def start(model, before=None):
            folder = tmp_path_factory.mktemp("bridge")
            if before is None:
                upstream, upstream_url = programs.enter_context(
                    run_tinker_server(
                        "tests.tinker_cloud.deviating_engine", folder / "upstream.log", [model],
                        folder / "upstream", "--older",
                    )
                )  # fmt: skip
                store = folder / "store"
            else:
                upstream_url, upstream, store = before.upstream_url, before.upstream, before.store
            log, options = folder / "bridge.log", ("--upstream", upstream_url, "--rank", "8")
            process, url = programs.enter_context(
                run_tinker_server("lachesis.skyrl_bridge", log, [model], store, *options)
            )
            return Bridge(url, model, process, upstream, upstream_url, store, log)

        yield start


@pytest.fixture(scope="session")
def bridge(start_bridge, random_model):
    """One bridge for all tests that do not end it or its engine."""
    return start_bridge(random_model)
