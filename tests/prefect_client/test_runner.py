"""Our runner at a real Prefect server: what people made stays, and what has completed too."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.store import RunStore
from tests.harness.home import make_record
from tests.harness.prefect_server import (
    WORK_S,
    end_runner_around_completion,
    read_state,
    run_lingering_flow_runner,
)
from tests.harness.waiting import wait_until

# The first poll of the runner's watch fails, as it does where a private part of Prefect is gone.
FAILING_WATCH = """
from deployments import runner

def record_waiting_runs():
    runner.record_waiting_runs = lambda: print("the watch polls", flush=True)
    raise AttributeError("gone")

runner.WATCH_POLL_S = 0.1
runner.record_waiting_runs = record_waiting_runs
"""

pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
def test_the_end_of_the_runner_leaves_a_completed_run_completed(
    prefect_api: PrefectApi, tmp_path: Path
) -> None:
    """Its process is still exiting; the fault matrix repeats this with other pauses."""
    states = end_runner_around_completion(prefect_api, tmp_path, WORK_S + 1.0)
    assert states[-2:] == ["RUNNING", "COMPLETED"]


def test_schedules_of_people_survive_the_start_of_the_runner(prefect_api, tmp_path):
    """Prefect's pages and commands make them without a slug."""
    daily = {"cron": "0 3 * * *", "timezone": "UTC"}
    hourly = {"interval": 3600, "anchor_date": "2026-01-01T00:00:00Z", "timezone": "UTC"}

    def read_schedules():
        deployment: Any = prefect_api._request("GET", "/deployments/name/linger/test")
        return sorted(
            (
                str(schedule["schedule"].get("cron") or schedule["schedule"]["interval"]),
                schedule["active"],
                schedule["parameters"],
            )
            for schedule in deployment["schedules"]
        )

    with run_lingering_flow_runner(prefect_api, tmp_path):
        deployment: Any = prefect_api._request("GET", "/deployments/name/linger/test")
    prefect_api._request(
        "POST",
        f"/deployments/{deployment['id']}/schedules",
        [
            {"schedule": daily, "active": True, "parameters": {"text": "by hand"}},
            {"schedule": {**daily, "cron": "0 4 * * *"}, "active": False, "slug": "mine"},
            {"schedule": hourly, "active": False},
        ],
    )
    before = read_schedules()
    assert len(before) == 3
    for _ in range(2):
        with run_lingering_flow_runner(prefect_api, tmp_path):
            assert read_schedules() == before


def test_a_watch_of_flow_runs_that_fails_is_begun_again_and_said(prefect_api, tmp_path):
    log = tmp_path / "runner.log"
    with run_lingering_flow_runner(prefect_api, tmp_path, FAILING_WATCH):
        wait_until(lambda: "the watch polls" in log.read_text(), 60, log=log)
    assert "the watch of flow runs has failed; it begins again in 1 s" in log.read_text()


def test_prefect_refuses_to_suspend_a_flow_run_that_has_not_begun(prefect_api, tmp_path):
    """Therefore the page of recovery names `lachesis stop` for a run that waits for its place."""
    with run_lingering_flow_runner(prefect_api, tmp_path):
        deployment: Any = prefect_api._request("GET", "/deployments/name/linger/test")
    flow_run = prefect_api.create_flow_run(
        deployment["id"], name="queued", parameters={}, tags=[], key="queued"
    )
    until = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    details = {"pause_timeout": until, "pause_reschedule": True}
    state = {"type": "PAUSED", "name": "Suspended", "state_details": details}
    answer: Any = prefect_api._request(
        "POST", f"/flow_runs/{flow_run['id']}/set_state", {"state": state}
    )
    assert answer["status"] in ("REJECT", "ABORT")
    assert (prefect_api.read_flow_run(flow_run["id"]) or {})["state"]["type"] == "SCHEDULED"


@pytest.mark.long
def test_a_training_that_completes_after_its_flow_run_was_marked_as_crashed(
    prefect_api: PrefectApi, tmp_path: Path
) -> None:
    """A flow process that survives its runner may have only the report left to write."""
    store = RunStore()
    with run_lingering_flow_runner(prefect_api, tmp_path):
        deployment: Any = prefect_api._request("GET", "/deployments/name/linger/test")
    flow_run_ids = {}
    for run_id, state, status in (
        ("0000000a", "RUNNING", "running"),
        ("0000000b", "CRASHED", "completed"),
        ("0000000c", "CRASHED", "failed"),
    ):
        flow_run = prefect_api.create_flow_run(
            deployment["id"], name=run_id, parameters={}, tags=[], key=f"{tmp_path}-{run_id}"
        )
        flow_run_ids[run_id] = flow_run["id"]
        prefect_api.set_state(flow_run["id"], {"type": state}, force=True)
        store.create(make_record(run_id=run_id, status=status, flow_run_id=flow_run["id"]))

    def read_states():
        return {run_id: read_state(prefect_api, id_) for run_id, id_ in flow_run_ids.items()}

    expected = {"0000000a": "CRASHED", "0000000b": "COMPLETED", "0000000c": "CRASHED"}
    with run_lingering_flow_runner(prefect_api, tmp_path):
        assert read_states() == expected
        store.update("0000000a", status="completed")
        expected["0000000a"] = "COMPLETED"
        wait_until(lambda: read_states() == expected, 60, read_states, poll_s=0.5)
