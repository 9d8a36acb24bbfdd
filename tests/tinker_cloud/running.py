"""Start a rehearsal cloud: an engine that serves all stand-ins, and the proxy in front of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lachesis.supervision.services.ports import reserve_free_ports
from tests.app_server import serve
from tests.patience import deadline
from tests.tinker_cloud.proxy import RehearsalCloud, create_app
from tests.tinker_cloud.stand_ins import STAND_INS

KEY = "tml-rehearsal"
ENGINE_TOKEN = "tml-engine-of-the-rehearsal"


@dataclass
class ServedCloud:
    """A running rehearsal cloud."""

    url: str
    cloud: RehearsalCloud
    hf_home: Path

    @property
    def env(self) -> dict[str, str]:
        """Return the variables of a client."""
        return {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": KEY,
            "HF_HOME": str(self.hf_home),
            "HF_HUB_OFFLINE": "1",
        }

    def begin(self, kind: str, at_call: int = 0, **options: Any) -> None:
        """Begin a fault, by default at once."""
        answer = httpx.post(
            f"{self.url}/control/faults",
            json={"kind": kind, "at_call": at_call, **options},
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text

    def lift(self) -> None:
        """Lift all faults."""
        httpx.delete(f"{self.url}/control/faults", trust_env=False)


@contextlib.contextmanager
def serve_cloud(
    folder: Path, models: Sequence[str] = tuple(STAND_INS), port: int | None = None
) -> Iterator[ServedCloud]:
    """A rehearsal cloud whose stand-ins are in `folder/hf`, for as long as the block lasts."""
    hf_home = folder / "hf"
    with _run_engine(folder, hf_home, models) as engine_url:
        cloud = RehearsalCloud(engine_url, ENGINE_TOKEN, KEY)
        with serve(create_app(cloud), port) as url:
            yield ServedCloud(url, cloud, hf_home)


@contextlib.contextmanager
def _run_engine(folder: Path, hf_home: Path, models: Sequence[str]) -> Iterator[str]:
    port = reserve_free_ports(1)[0]
    flags = [part for name in models for part in ("--model", name)]
    store = folder / "store"
    command = [sys.executable, "-m", "lachesis.engine", "--port", str(port), *flags]
    env = {
        **os.environ,
        "LACHESIS_ENGINE_TOKEN": ENGINE_TOKEN,
        "HF_HOME": str(hf_home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    log = folder / "engine.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--store", str(store)],
            stdout=stream,
            stderr=stream,
            env=env,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(f"{url}/api/v1/healthz", process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = deadline(120)
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(url, headers={"X-API-Key": ENGINE_TOKEN}, trust_env=False)
            if answer.status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text())
