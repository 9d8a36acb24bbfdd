"""Suspended runs at a real Prefect server; no runner is there, so no flow begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lachesis.base.errors import ServerDownError
from lachesis.base.timestamps import now_iso
from lachesis.orchestration import refresh, submit
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.orchestration.resuming import belongs_to_attempt, needs_new_attempt, resubmit_run
from lachesis.orchestration.suspension import (
    SUSPENDED,
    describe_suspension,
    record_suspension,
    remove_pause_timeout,
)
from lachesis.runs.run_record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.service import LachesisService

pytestmark = pytest.mark.timeout(300)
VALUES = {"environment": "e", "environment_file": "e.py", "profile": "embedded", "base_model": "m"}
VALUES |= {"total_steps": 100, "seed": 0, "wandb_project": "p", "wandb_run_name": "n"}  # type: ignore[dict-item]
SetState = Callable[..., None]


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    """A submitted run."""
    monkeypatch.setenv("PREFECT_API_URL", server)
    monkeypatch.setenv("LACHESIS_DEPLOYMENT", "test")
    store = RunStore()
    record = RunRecord.model_validate({"run_id": f"{time.time_ns():x}"[-8:], **VALUES})
    store.create(record)
    submit.submit_run(store, record)
    return store


def record_of(store: RunStore) -> RunRecord:
    return store.all()[0]


def seen(store: RunStore) -> RunRecord:
    """As `lachesis status` shows it."""
    return refresh.refresh_run(store, record_of(store))


def set_state(store: RunStore, state_type: str, **state: Any) -> None:
    path = f"/flow_runs/{record_of(store).flow_run_id}/set_state"
    PrefectApi()._request("POST", path, {"state": {"type": state_type, **state}, "force": True})


def suspend(store: RunStore) -> None:
    """As the dialog in Prefect does."""
    until = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    set_state(
        store,
        "PAUSED",
        name="Suspended",
        state_details={"pause_reschedule": True, "pause_timeout": until},
    )


def state_of(store: RunStore) -> dict[str, Any]:
    flow_run = PrefectApi().read_flow_run(record_of(store).flow_run_id or "")
    assert flow_run is not None
    return dict(flow_run["state"])


def end_suspended(store: RunStore) -> RunRecord:
    """What a flow does that finds itself suspended while it trains."""
    record = record_of(store)
    set_state(store, "RUNNING")
    store.update(record.run_id, status="running", started_at=now_iso())
    suspend(store)
    record_suspension(store, record_of(store))
    remove_pause_timeout(PrefectApi(), record.flow_run_id or "")
    return store.update(
        record.run_id,
        status="stopped",
        error=describe_suspension(record.run_id),
        ended_at=now_iso(),
        attempt_duration_s=1.0,
    )


@pytest.mark.parametrize("pause", [True, False])
def test_a_suspension_loses_its_time_limit(store: RunStore, pause: bool) -> None:
    """A pause whose process should wait becomes a suspension."""
    set_state(store, "PAUSED", name="Paused", state_details={"pause_reschedule": False})
    if not pause:
        suspend(store)
    flow_run_id = record_of(store).flow_run_id or ""
    assert remove_pause_timeout(PrefectApi(), flow_run_id)
    state = state_of(store)
    assert (state["type"], state["name"]) == ("PAUSED", "Suspended")
    assert state["state_details"]["pause_timeout"] is None
    assert state["state_details"]["pause_reschedule"] is True
    assert remove_pause_timeout(PrefectApi(), flow_run_id)
    assert state_of(store)["id"] == state["id"], "it is not written again"


@pytest.mark.parametrize("state", ["SCHEDULED", "RUNNING"])
def test_a_resume_since_the_last_look_is_not_overwritten(
    store: RunStore,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
) -> None:
    """Somebody resumes it after it was found suspended, and before the run is ended."""
    suspend(store)
    flow_runs = PrefectApi.read_flow_runs

    def then_resumed(api: PrefectApi, flow_run_ids: list[str]) -> dict[str, Any]:
        before = flow_runs(api, flow_run_ids)
        set_state(store, state)
        return before

    monkeypatch.setattr(PrefectApi, "read_flow_runs", then_resumed)
    seen(store)
    assert state_of(store)["type"] == state
    record = record_of(store)
    assert (record.status, record.stop_reason) == ("pending", None), "its flow begins it"


def test_a_run_suspended_before_it_began_is_stopped(store: RunStore) -> None:
    suspend(store)
    record = seen(store)
    assert (record.status, record.stop_reason) == ("stopped", SUSPENDED)
    assert record.error == describe_suspension(record.run_id)
    assert state_of(store)["state_details"]["pause_timeout"] is None
    assert needs_new_attempt(record), "the flow that begins now makes a new attempt"
    assert not needs_new_attempt(record.model_copy(update={"stop_reason": None}))
    assert seen(store).status == "stopped"


def test_a_run_that_was_stopped_and_then_suspended_is_not_told_to_resume_in_prefect(
    store: RunStore,
) -> None:
    suspend(store)
    store.update(record_of(store).run_id, stop_reason=submit.STOPPED_BY_USER)
    record = seen(store)
    assert (record.status, record.stop_reason) == ("stopped", submit.STOPPED_BY_USER)
    assert "Resume" not in (record.error or "")


def test_a_run_that_is_being_suspended_is_stopping(store: RunStore) -> None:
    set_state(store, "RUNNING")
    record = store.update(record_of(store).run_id, status="running", started_at=now_iso())
    suspend(store)
    with store.dir(record.run_id).hold_alive_lock():
        assert seen(store).status == "stopping"
    assert record_of(store).status == "running", "its flow writes its end"


def test_a_resume_in_prefect_is_seen_before_the_flow_begins(store: RunStore) -> None:
    record = end_suspended(store)
    assert seen(store).status == "stopped"
    assert PrefectApi().resume(record.flow_run_id or "")
    assert not PrefectApi().resume(record.flow_run_id or "")
    waiting = seen(store)
    assert (waiting.status, waiting.error) == ("pending", None)
    assert LachesisService().resume(record.run_id).status == "pending"
    assert record_of(store).attempt == 1, "its flow makes the attempt"
    assert belongs_to_attempt(record_of(store), record.flow_run_id)
    assert needs_new_attempt(record_of(store))
    set_state(store, "RUNNING")
    assert seen(store).status == "pending"
    assert resubmit_run(store, record).attempt == 1


def test_resumes_at_once_make_one_attempt_of_the_same_flow_run(store: RunStore) -> None:
    record = end_suspended(store)
    with ThreadPoolExecutor(4) as pool:
        resumed = list(pool.map(lambda _: resubmit_run(store, record, auto_resumes=7), range(4)))
    assert {one.flow_run_id for one in resumed} == {record.flow_run_id}
    now_queued = record_of(store)
    assert (now_queued.attempt, now_queued.status, now_queued.auto_resumes) == (2, "pending", 7)
    assert now_queued.stop_reason is None
    assert not needs_new_attempt(now_queued), "its attempt is made"
    assert belongs_to_attempt(now_queued, record.flow_run_id)
    assert state_of(store)["name"] == "Resuming"


@pytest.mark.parametrize("ended_as", ["CANCELLED", "FAILED"])
def test_a_flow_run_that_is_gone_is_followed_by_another(store: RunStore, ended_as: str) -> None:
    """Somebody has cancelled it, or changed its state."""
    record = end_suspended(store)
    set_state(store, ended_as)
    known = seen(store)
    assert (
        known.error
        == known.stop_reason
        == f"{SUSPENDED}, where its flow run is {ended_as.lower()} by now"
    )
    resumed = resubmit_run(store, known)
    assert resumed.flow_run_id not in (None, record.flow_run_id)
    assert not belongs_to_attempt(resumed, record.flow_run_id), "that one is started by hand"
    assert state_of(store)["type"] == "SCHEDULED"


def test_a_flow_run_that_ends_at_the_last_moment_is_followed_by_another(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = end_suspended(store)
    monkeypatch.setattr(
        "lachesis.orchestration.resuming.find_flow_run_to_resume",
        lambda *_: _then_cancelled(store, record),
    )
    resumed = resubmit_run(store, record)
    assert resumed.flow_run_id not in (None, record.flow_run_id)
    assert state_of(store)["type"] == "SCHEDULED"


def _then_cancelled(store: RunStore, record: RunRecord) -> dict[str, Any] | None:
    flow_run = PrefectApi().read_flow_run(record.flow_run_id or "")
    set_state(store, "CANCELLED")
    return flow_run


def test_a_server_that_goes_leaves_the_record_as_it_was(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = end_suspended(store)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(ServerDownError):
        resubmit_run(store, record)
    assert record_of(store) == record
    with pytest.raises(ServerDownError):
        submit.cancel_suspended_run(store, record)
    assert record_of(store) == record
    assert seen(store) == record


def test_a_stop_takes_the_suspension_back(store: RunStore) -> None:
    record = end_suspended(store)
    store.update(record.run_id, error=f"{record.error}; the steps after 3 of 4 were not saved")
    LachesisService().stop(record.run_id)
    assert state_of(store)["type"] == "CANCELLED"
    stopped = record_of(store)
    assert (
        stopped.error
        == "suspended in Prefect, then stopped by its user; the steps after 3 of 4 were not saved"
    )
    assert not PrefectApi().resume(record.flow_run_id or "")
    LachesisService().stop(record.run_id)
    assert record_of(store) == stopped


def test_a_stop_of_a_run_that_was_resumed_in_prefect(store: RunStore) -> None:
    record = end_suspended(store)
    assert PrefectApi().resume(record.flow_run_id or "")
    LachesisService().stop(record.run_id)
    assert state_of(store)["type"] == "CANCELLED"
    assert record_of(store).stop_reason == submit.STOPPED_BY_USER
    assert seen(store).status == "stopped"


def test_the_first_reason_to_end_stays(store: RunStore) -> None:
    record = store.update(record_of(store).run_id, stop_reason="budget")
    assert record_suspension(store, record).stop_reason == "budget"


def test_a_run_that_was_stopped_before_it_was_suspended_gets_a_new_flow_run(
    store: RunStore,
) -> None:
    """Prefect's runner may be at the cancellation still, and would end the process of a flow run
    that goes on.
    """
    record = record_of(store)
    set_state(store, "RUNNING")
    suspend(store)
    stopped = {
        "status": "stopped",
        "stop_reason": "stopped by its user",
        "started_at": now_iso(),
        "ended_at": now_iso(),
    }
    resumed = resubmit_run(store, store.update(record.run_id, attempt_duration_s=1.0, **stopped))
    assert (resumed.attempt, resumed.status) == (2, "pending")
    assert resumed.flow_run_id not in (None, record.flow_run_id)
    earlier = PrefectApi().read_flow_run(record.flow_run_id or "")
    assert earlier is not None
    assert earlier["state"]["type"] == "CANCELLED"
