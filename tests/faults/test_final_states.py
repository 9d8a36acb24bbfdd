"""The runner ends around the end of a flow run: what has completed stays completed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lachesis.orchestration.prefect_api import PrefectApi
from tests.prefect_server import LINGER_S, WORK_S, end_runner_around_completion, serve_prefect

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.matrix]


@pytest.fixture(scope="module")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectApi]:
    with serve_prefect(tmp_path_factory.mktemp("prefect")) as api:
        yield api


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_has_completed_stays_completed(
    prefect_api: PrefectApi, tmp_path: Path, row: Callable[..., None], seed: int
) -> None:
    """Most ends fall into the seconds in which the process is still exiting."""
    pause_s = random.Random(seed).uniform(0.0, WORK_S + LINGER_S)
    states = end_runner_around_completion(prefect_api, tmp_path, pause_s)
    expected = "COMPLETED" if "COMPLETED" in states else "CANCELLED"
    assert states[-1] == expected, states
    row(
        fault="runner SIGTERM",
        phase=f"{pause_s - WORK_S:+.1f} s from the run's end",
        expected="completed, if it had",
        seen=states[-1].lower(),
    )


def test_a_completed_run_is_completed_after_the_server_was_ended_too(
    tmp_path: Path, row: Callable[..., None]
) -> None:
    home = tmp_path / "prefect"
    home.mkdir()
    with serve_prefect(home) as api:
        states = end_runner_around_completion(api, tmp_path, WORK_S + 0.5)
        (flow_run,) = api._request("POST", "/flow_runs/filter", {})  # type: ignore[misc]
    with serve_prefect(home) as api:
        state = (api.read_flow_run(flow_run["id"]) or {})["state"]["type"]
    assert (states[-1], state) == ("COMPLETED", "COMPLETED")
    row(
        fault="runner, then server SIGTERM", phase="exiting", expected="completed", seen="completed"
    )
