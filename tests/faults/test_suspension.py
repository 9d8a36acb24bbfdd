"""Suspend and Resume on the page of a flow run in Prefect, as its dialogs send them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from lachesis.base.json_text import Json
from lachesis.orchestration.server_info import find_api_url
from lachesis.orchestration.suspension import SUSPENDED
from lachesis.runs.run_record import RunRecord
from tests.faults.world import Run, World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]
Row = Callable[..., None]


def post(run: Run, action: str, body: Json | None = None) -> Json:
    url = f"{find_api_url()}/flow_runs/{run.record.flow_run_id}/{action}"
    send = lambda: httpx.post(url, json=body, timeout=20, trust_env=False)  # noqa: E731
    is_written = lambda: (answer := send()).status_code != 503 and answer  # noqa: E731
    answer = run.world.wait(is_written, 30, "a place to write in SQLite", 0.2)
    assert answer.status_code in (200, 201), answer.text
    return dict(answer.json())


def suspend(run: Run) -> None:
    """As the dialog does, with its time limit of five minutes."""
    until = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    details = {"pause_timeout": until, "pause_reschedule": True}
    details |= {"deferred": False, "untrackable_result": False}
    state = {"type": "PAUSED", "name": "Suspended", "state_details": details}
    assert post(run, "set_state", {"state": state, "force": True})["status"] == "ACCEPT"


def set_state(run: Run, **state: Any) -> None:
    post(run, "set_state", {"state": state, "force": True})


def resume(run: Run) -> str:
    """As the dialog does; what Prefect answers."""
    return str(post(run, "resume")["status"])


def state_of(run: Run) -> Json:
    url = f"{find_api_url()}/flow_runs/{run.record.flow_run_id}"
    return dict(httpx.get(url, timeout=20, trust_env=False).json()["state"])


def flow_runs(run: Run) -> int:
    """How many flow runs this run has had."""
    body = {"flow_runs": {"tags": {"all_": [f"run:{run.run_id}"]}}}
    url = f"{find_api_url()}/flow_runs/filter"
    return len(httpx.post(url, json=body, timeout=20, trust_env=False).json())


def suspended(run: Run, timeout_s: float = 120) -> RunRecord:
    """Wait for the end of a suspended attempt, which a resume in Prefect can go on with."""
    record = run.ended(timeout_s)
    assert (record.status, record.stop_reason) == ("stopped", SUSPENDED), record.error
    assert f"{SUSPENDED}; Resume on its page, or `lachesis resume {run.run_id}`" in (
        record.error or ""
    )
    state = state_of(run)
    assert (state["type"], state["name"]) == ("PAUSED", "Suspended")
    assert state["state_details"]["pause_reschedule"]
    assert state["state_details"]["pause_timeout"] is None, "else Prefect fails it after that time"
    return record


def trains_again(run: Run, attempt: int) -> None:
    """Wait until the run trains in this attempt, from its newest checkpoint."""
    run.world.wait(lambda: run.record.attempt == attempt, 120, f"attempt {attempt}")
    kept = run.kept()  # the attempt before has ended, and this one has not begun to train
    if kept:
        run.world.wait(lambda: run.record.resumed, 150, "the receipt")
        assert (run.record.resumed or {})["step"] == kept
    run.advances(1, 150)
    assert (run.record.attempt, run.seen().status) == (attempt, "running")
    assert state_of(run)["type"] == "RUNNING"


def test_a_run_is_suspended_and_resumed_in_prefect(world: World, row: Row) -> None:
    run = world.take("running")
    run.reach("running")
    before, flow_run_id, count = run.record.attempt, run.record.flow_run_id, flow_runs(run)
    began = time.monotonic()
    suspend(run)
    suspended(run)
    took = time.monotonic() - began
    kept = run.kept()
    assert kept == run.steps()[-1], "it was stopped with a checkpoint"
    assert "resume" in " ".join(world.service.get_status(run.run_id).next_steps)
    assert resume(run) == "ACCEPT"
    trains_again(run, before + 1)
    row(
        fault="suspend in Prefect",
        phase="running",
        expected="stopped",
        seen=f"after {took:.0f} s",
        kept=kept,
    )

    set_state(run, type="PAUSED", name="Paused", state_details={"pause_reschedule": False})
    suspended(run)
    world.service.resume(run.run_id)
    trains_again(run, before + 2)
    assert (run.record.flow_run_id, flow_runs(run)) == (flow_run_id, count), (
        "no flow run is left behind"
    )
    world.current = run


def test_a_resume_while_the_run_is_still_being_stopped(world: World, row: Row) -> None:
    run = world.take("running")
    run.reach("running")
    before = run.record.attempt
    suspend(run)
    world.wait(lambda: run.record.stop_reason == SUSPENDED, 30, "the suspension to be noticed")
    assert resume(run) == "ACCEPT"
    trains_again(run, before + 1)
    suspend(run)
    assert resume(run) == "ACCEPT", "before anybody has noticed"
    trains_again(run, before + 2)
    world.current = run
    row(
        fault="resume in Prefect",
        phase="stopping",
        expected="one attempt",
        seen="one attempt",
        kept=run.kept(),
    )


def test_several_resumes_at_once_of_a_suspended_run_give_one_attempt(
    world: World, row: Row
) -> None:
    run = world.take("running")
    run.reach("running")
    before, count = run.record.attempt, flow_runs(run)
    suspend(run)
    suspended(run)
    calls: list[Callable[[], object]] = [
        lambda: resume(run),
        lambda: world.service.resume(run.run_id),
    ] * 2
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()
    trains_again(run, before + 1)
    assert flow_runs(run) == count
    world.current = run
    row(
        fault="suspend then lachesis resume",
        phase="ended",
        expected="one attempt",
        seen="one attempt",
        kept=run.kept(),
    )


def test_a_run_is_suspended_while_it_starts(world: World, row: Row) -> None:
    run = world.take("starting")
    run.reach("starting")
    suspend(run)
    suspended(run, 60)
    assert resume(run) == "ACCEPT"
    world.wait(lambda: run.record.attempt == 2, 60, "the second attempt")
    run.reach("starting")
    suspend(run)
    suspended(run, 60)
    run.resume()
    assert run.record.attempt == 3
    assert flow_runs(run) == 1
    world.current = run
    row(
        fault="suspend, resume in Prefect",
        phase="starting",
        expected="stopped, resumed",
        seen="stopped, resumed",
    )


def test_a_run_is_suspended_while_it_waits_for_its_place(world: World, row: Row) -> None:
    runner = world.part("runner")
    world.strike(runner, signal.SIGSTOP)
    try:
        run = world.start()
        suspend(run)
        assert run.seen().status == "stopped"
        suspended(run)
        assert resume(run) == "ACCEPT"
        assert run.seen().status == "pending", "as its flow run is"
        suspend(run)
        assert run.seen().status == "stopped"
    finally:
        world.strike(runner, signal.SIGCONT)
    run.resume()
    assert flow_runs(run) == 1
    world.current = run
    row(
        fault="suspend in Prefect",
        phase="queued",
        expected="stopped; resumed",
        seen="stopped; resumed",
    )


def test_a_suspension_and_a_stop(world: World, row: Row) -> None:
    """The flow run of a suspended run that is stopped or cancelled cannot be resumed any more; the
    run can.
    """
    run = world.take("running")
    run.reach("running")
    suspend(run)
    suspended(run)
    set_state(run, type="CANCELLING", name="Cancelling")
    world.wait(lambda: state_of(run)["type"] == "CANCELLED", 60, "the end of the flow run", 0.2)
    assert "Resume on its page" not in (run.seen().error or "")
    assert "cancelled" in (run.record.error or "")
    cancelled = run.record.flow_run_id
    run.resume()
    assert run.record.flow_run_id != cancelled

    suspend(run)
    suspended(run)
    world.service.stop(run.run_id)
    world.wait(lambda: state_of(run)["type"] == "CANCELLED", 60, "the end of the flow run", 0.2)
    assert resume(run) == "ABORT"
    assert "stopped by its user" in (run.record.error or "")
    run.resume()

    world.service.stop(run.run_id)
    suspend(run)
    assert run.ended().status == "stopped"
    assert run.kept() == run.steps()[-1]
    world.wait(
        lambda: state_of(run)["type"] in ("CANCELLED", "PAUSED"), 60, "the end of the flow run", 0.2
    )
    run.resume()
    world.current = run
    row(
        fault="suspend, and stop",
        phase="stopping, ended",
        expected="stopped; resumed",
        seen="stopped; resumed",
    )
