"""Start a rehearsal cloud: an engine that serves all stand-ins, and the proxy in front of it."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.harness.processes import run_tinker_server, serve
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
    env = {"LACHESIS_ENGINE_TOKEN": ENGINE_TOKEN, "HF_HOME": str(hf_home), "OMP_NUM_THREADS": "1"}
    log, store = folder / "engine.log", folder / "store"
    with run_tinker_server("lachesis.engine", log, models, store, **env) as (_, engine_url):
        cloud = RehearsalCloud(engine_url, ENGINE_TOKEN, KEY)
        with serve(create_app(cloud), port) as url:
            yield ServedCloud(url, cloud, hf_home)
