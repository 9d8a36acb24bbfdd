"""The runner ends around the end of a flow run: what has completed stays completed."""

import random
import signal
import time
from typing import Any

import pytest

from lachesis.prefect_client.resources import PrefectApi
from tests.harness.prefect_server import (
    LINGER_S,
    WORK_S,
    end_runner_around_completion,
    read_state,
    serve_prefect,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.matrix]
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "CRASHED")


@pytest.fixture(scope="module")
def prefect_api(tmp_path_factory):
    with serve_prefect(tmp_path_factory.mktemp("prefect")) as api:
        yield api


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_has_completed_stays_completed(prefect_api, tmp_path, row, seed):
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


def test_a_completed_run_is_completed_after_the_server_was_ended_too(tmp_path, row):
    home = tmp_path / "prefect"
    home.mkdir()
    with serve_prefect(home) as api:
        states = end_runner_around_completion(api, tmp_path, WORK_S + 0.5)
        (flow_run,) = api._request("POST", "/flow_runs/filter", {})  # type: ignore[misc]
    with serve_prefect(home) as api:
        state = read_state(api, flow_run["id"])
    assert (states[-1], state) == ("COMPLETED", "COMPLETED")
    row(
        fault="runner, then server SIGTERM", phase="exiting", expected="completed", seen="completed"
    )


@pytest.mark.parametrize("seed", range(20))
def test_server_and_runner_are_killed_in_the_second_in_which_a_run_completes(served, row, seed):
    """Half of the seeds kill before the record says that it has completed, half after it. A run
    that has lost its runner before that fails; one that has completed is so in both places.
    """
    chance = random.Random(seed)
    run = served.start(total_steps=2)
    if seed % 2:
        served.wait(lambda: len(run.steps()) >= 2, 150, "the last step", 0.02)
        pause_s = chance.uniform(0.0, 2.0)
    else:
        served.wait(lambda: run.record.status == "completed", 150, "the end of the run", 0.02)
        pause_s = chance.uniform(0.0, 1.0)
    time.sleep(pause_s)
    status = run.record.status
    parts = [served.part("server"), served.part("runner")]
    chance.shuffle(parts)
    for pid in parts:
        served.strike(pid, signal.SIGKILL)
    served.restarts += 1
    served.wait(lambda: not {*parts} & set(served.processes()), 30, "the end of both")
    served.serve()
    record = run.ended(150)
    flow_run_id = record.flow_run_id or ""

    def read_run_state():
        state: dict[str, Any] = (PrefectApi().read_flow_run(flow_run_id) or {})["state"]
        return state

    # A flow that outlives its runner may complete after the next runner has marked it as crashed.
    served.wait(
        lambda: (
            read_run_state()["type"] in ENDED
            and (read_run_state()["type"] == "COMPLETED") == (run.record.status == "completed")
        ),
        90,
        "one word in both places",
        0.5,
    )
    record = run.record
    served.wait(lambda: run.seen().status == record.status, 30, "one word everywhere", 0.5)
    state = read_run_state()
    if status == "completed":
        assert record.status == "completed"
    assert (state["type"] == "COMPLETED") == (record.status == "completed"), (state, record.error)
    row(
        fault="server and runner SIGKILL",
        phase=f"{status}, {pause_s:.1f} s after the {'last step' if seed % 2 else 'end'}",
        expected="one word",
        seen=f"{record.status}, {state['name']}",
    )
