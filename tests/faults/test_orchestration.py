"""Signals to what surrounds the services: the flow's process, its reaper, the runner and the
Prefect server.
"""

import json
import time
from typing import Any

import httpx
import pytest

from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.serve_info import server_file
from lachesis.runs.end_causes import CAUSES, EndCause
from tests.faults.signals import KILL, STOP, TERM, Case, play

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]
GONE = CAUSES[EndCause.SERVE_LOST].sentence
SIGNAL = CAUSES[EndCause.SIGNAL].sentence
SERVE_ENDED = CAUSES[EndCause.SERVE_ENDED].sentence
CASES = [
    Case("flow", KILL, "starting", "failed", "-9", resume=True),
    Case("flow", TERM, "starting", "stopped", SIGNAL),
    Case("flow", STOP, "starting", "running"),
    Case("flow", KILL, "running", "failed", "-9", resume=True),
    Case("flow", TERM, "running", "stopped", SIGNAL, resume=True),
    Case("flow", STOP, "running", "running"),
    Case("flow", KILL, "checkpointing", "failed", "-9"),
    Case("flow", TERM, "checkpointing", "stopped", SIGNAL),
    Case("flow", STOP, "checkpointing", "running"),
    Case("reaper", KILL, "starting", "failed", "reaper"),
    Case("reaper", KILL, "running", "failed", "reaper", resume=True),
    Case("reaper", TERM, "running", "running"),
    Case("reaper", STOP, "running", "running"),
    Case("runner", KILL, "starting", "failed", GONE),
    Case("runner", TERM, "starting", "stopped", SERVE_ENDED),
    Case("runner", STOP, "starting", "running"),
    Case("runner", KILL, "running", "failed", GONE, resume=True),
    Case("runner", TERM, "running", "stopped", SERVE_ENDED, resume=True),
    Case("runner", STOP, "running", "running"),
    Case("runner", KILL, "checkpointing", "failed", GONE),
    Case("runner", TERM, "checkpointing", "stopped", SERVE_ENDED),
    Case("runner", STOP, "checkpointing", "running"),
    Case("server", KILL, "starting", "running"),
    Case("server", TERM, "starting", "running"),
    Case("server", STOP, "starting", "running"),
    Case("server", KILL, "running", "running"),
    Case("server", TERM, "running", "running"),
    Case("server", STOP, "running", "running"),
    Case("server", KILL, "checkpointing", "running"),
    Case("server", TERM, "checkpointing", "running"),
    Case("server", STOP, "checkpointing", "running"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_signal_to_what_surrounds_the_services(served, case, row):
    play(served, case, row)
    if case.part in ("runner", "server"):
        assert served.launcher is not None
        assert served.launcher.poll() is None, "the launcher lives on"


def test_a_schedule_by_hand_outlives_the_runner(served, row):
    """It has no slug, as Prefect's page makes it; each start of the runner saves its flows anew."""
    api = PrefectApi()
    deployment = api.read_deployment("train", "train")
    assert deployment is not None
    path = f"/deployments/{deployment['id']}/schedules"
    cron = {"cron": "0 3 * * *", "timezone": "UTC"}
    api._request("POST", path, [{"schedule": cron, "active": False}])

    def find_nightly():
        schedules: Any = api._request("GET", path)
        return [one for one in schedules if one["schedule"].get("cron") == cron["cron"]]

    for _ in range(2):
        served.restarts += 1
        runner = served.part("runner")
        served.strike(runner, TERM)
        served.wait(lambda pid=runner: served.part("runner") != pid, 90, "another runner")
        served.serve()
        (schedule,) = find_nightly()
        assert schedule["active"] is False
    api._request("DELETE", f"{path}/{schedule['id']}")
    row(fault="runner SIGTERM", phase="a schedule by hand", expected="it stays", seen="it stays")


def test_the_server_dies_while_the_runner_is_started_again(served, row):
    """The new runner waits for its server, so the launcher must not wait for the runner alone."""
    served.stop_serving()
    served.serve()
    log = served.home / "launcher.log"
    num_restarts = log.read_text().count("the Prefect runner exited")
    server = served.part("server")
    served.strike(served.part("runner"), KILL)
    served.wait(
        lambda: log.read_text().count("the Prefect runner exited") > num_restarts,
        30,
        "the launcher to notice",
    )
    served.strike(server, KILL)
    served.restarts += 1
    struck_at = time.monotonic()
    served.serve()
    served.wait(PrefectApi().is_healthy, 60, "the server to answer", 0.5)
    assert served.launcher is not None
    assert served.launcher.poll() is None, "the launcher lives on"
    live_parts = [name for name in ("server", "runner") if served.part(name) in served.processes()]
    assert live_parts == ["server", "runner"]
    row(
        fault="runner, then server SIGKILL",
        phase="idle",
        expected="server, runner",
        seen=", ".join(live_parts),
        noticed=f"{time.monotonic() - struck_at:.0f}",
    )


def test_the_launcher_is_killed(served, row):
    """Server and runner live on, and so do the runs; `lachesis doctor --fix` ends them, the runs
    with a checkpoint.
    """
    run = served.take("running")
    run.reach("running")
    assert served.launcher is not None
    served.launcher.kill()
    served.launcher.wait()
    run.advances(1)
    done = served.fix()
    assert (
        sum("deployments.runner" in one or "deployments.prefect_server" in one for one in done) == 2
    ), done
    record = run.ended()
    assert record.status == "stopped", record.error
    assert run.kept() == run.steps()[-1]
    served.serve()
    run.resume()
    served.current = run
    row(
        fault="launcher SIGKILL",
        phase="running",
        expected="doctor --fix ends all",
        seen="stopped; resumed",
        kept=run.kept(),
    )


def test_a_server_that_came_back_is_obeyed(served, row):
    """Prefect's own look-out for cancellations gives up while the server is away."""
    run = served.take("running")
    run.reach("running")
    served.restarts += 2
    first = served.part("server")
    served.strike(first, KILL)
    served.wait(
        lambda: any(
            "deployments.prefect_server" in one
            for pid, one in served.processes().items()
            if pid != first
        ),
        20,
        "another",
    )
    time.sleep(3)
    second = next(
        pid
        for pid, one in served.processes().items()
        if "deployments.prefect_server" in one and pid != first
    )
    served.strike(second, KILL)
    time.sleep(4)
    served.wait(lambda: PrefectApi().is_healthy(), 60, "the new server", poll_s=0.2)
    time.sleep(10)
    run.advances(1)
    PrefectApi().cancel(run.record.flow_run_id or "", "by hand")
    record = run.ended()
    assert record.status == "stopped", record.error
    assert run.kept() == run.steps()[-1]
    row(
        fault="cancel after the server came back",
        phase="running",
        expected="stopped",
        seen="stopped",
        kept=run.kept(),
    )


def test_a_run_is_cancelled_before_it_has_a_process(served, row):
    """As when the stop comes while the runner claims it; Prefect's server gives it up after five
    minutes.
    """
    url = json.loads(server_file(served.home).read_text())["api_url"]
    with httpx.Client(base_url=url, trust_env=False) as prefect:
        deployment = prefect.get("/deployments/name/train/train").json()["id"]
        later = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2099-01-01T00:00:00Z"}}
        body = {"parameters": {"environment": "steady"}, "state": later}
        flow_run = prefect.post(f"/deployments/{deployment}/create_flow_run", json=body).json()[
            "id"
        ]
        for state in ("PENDING", "CANCELLING"):
            prefect.post(
                f"/flow_runs/{flow_run}/set_state", json={"state": {"type": state}, "force": True}
            )
        assert prefect.get(f"/flow_runs/{flow_run}").json()["state"]["type"] == "CANCELLING"
        began = time.monotonic()
        served.wait(
            lambda: prefect.get(f"/flow_runs/{flow_run}").json()["state"]["type"] == "CANCELLED",
            40,
            "its end",
            0.2,
        )
    row(
        fault="cancel without a process",
        phase="queued",
        expected="cancelled",
        seen=f"after {time.monotonic() - began:.0f} s",
    )


def test_the_launcher_ends_while_its_server_is_away(served, row):
    """It starts the server once more, which the runner needs to end its runs."""
    run = served.take("running")
    run.reach("running")
    served.strike(served.part("server"), KILL)
    time.sleep(0.2)
    served.stop_serving()
    assert served.processes() == {}
    assert run.record.status == "stopped", run.record.error
    assert run.kept() == run.steps()[-1]
    row(
        fault="launcher SIGTERM, server dead",
        phase="running",
        expected="stopped",
        seen="stopped",
        kept=run.kept(),
    )


def test_the_server_dies_six_times_in_a_minute(served, row):
    """The run trains on, runner and launcher live on, and a stop is carried out after it."""
    run = served.take("running")
    run.reach("running")
    began_at = time.monotonic()
    for _ in range(6):  # Each time as soon as it is there again.
        server = served.wait(
            lambda: (pid := served.part("server")) in served.processes() and pid, 120, "a server"
        )
        served.strike(server, KILL)
        served.wait(lambda pid=server: pid not in served.processes(), 20, "its end")
    served.restarts = 3  # The next case begins with another launcher.
    run.advances()
    served.wait(PrefectApi().is_healthy, 150, "the server to answer", 0.5)
    assert served.launcher is not None
    assert served.launcher.poll() is None, "the launcher lives on"
    assert run.seen().status == "running"
    assert served.part("runner") in served.processes()
    record = run.stop()
    assert record.end_cause is EndCause.PERSON
    row(
        fault="server SIGKILL six times",
        phase="running",
        expected="running",
        seen=f"running; stopped after it; {time.monotonic() - began_at:.0f} s",
        kept=run.kept(),
    )
