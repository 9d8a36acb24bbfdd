"""The tick ends what a run has left behind, and resumes a run that shall go on."""

import os
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import pytest

from lachesis.base.errors import ServerDownError
from lachesis.base.timestamps import now_iso
from lachesis.config import run_config as run_config
from lachesis.monitor.tick import Monitor
from lachesis.operations.runs import stop_run
from lachesis.prefect_client import stop
from lachesis.runs.end_causes import EndCause
from lachesis.runs.ending import end_run
from lachesis.runs.store import RunStore
from lachesis.supervision.process_marks import MARK_VARIABLE, build_mark
from tests.monitor.tick.runs import frozen, start, without_a_server


def test_a_run_whose_flow_died_is_told_and_what_it_left_is_ended(store, make):
    """Its lock is free, so flow and reaper are gone; a child of its environment lives on. A
    stranger in its folder stays.
    """
    make(alive=False)
    folder = store.dir("0123abcd").path
    (folder / ".alive").touch()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = start(command, env={**os.environ, MARK_VARIABLE: build_mark(folder)})
    stranger = start(command, cwd=folder, env={**os.environ, MARK_VARIABLE: f"{folder}:guessed"})
    (seen,) = Monitor(store).tick()
    assert store.load("0123abcd").status == "failed"
    assert "its flow is gone" in str(store.load("0123abcd").error)
    assert not psutil.pid_exists(left.pid)
    left.wait(5)
    assert stranger.poll() is None
    assert any(f"ended a leftover process: {left.pid}" in text for text in seen.messages)


def test_a_run_that_was_stopped_to_go_on_is_resumed(store, make, monkeypatch):
    make(
        alive=False,
        status="stopped",
        ended_at=now_iso(),
        resume_requested=True,
        started_at="2026-01-01T00:00:00+00:00",
    )
    store.update("0123abcd", ended_at="2026-01-01T02:00:00+00:00")
    without_a_server(monkeypatch)
    (seen,) = Monitor(store).tick()
    record = store.load("0123abcd")
    assert (record.status, record.attempt, record.auto_resumes, record.resume_requested) == (
        "pending",
        2,
        1,
        False,
    )
    assert record.earlier_hours == 2.0
    assert seen.messages[0] == (
        "resumed from the beginning, because it has no checkpoint (time 1 of 3 without a person)"
    )


def test_what_was_seen_of_an_earlier_attempt_is_forgotten(store, make):
    """An answer that was missing then would make the new attempt a stalled one at once."""
    make()
    (seen,) = Monitor(store).tick()
    assert "trainer" in seen.memory.silent_since
    (store.dir("0123abcd").path / "monitor.json").write_text(
        seen.memory.model_copy(
            update={"silent_since": {"trainer": 1.0}, "stopping_since": -1000.0}
        ).model_dump_json()
    )
    assert Monitor(store).tick()[0].stall is not None
    store.update("0123abcd", flow_run_id="g")
    (seen,) = Monitor(store).tick()
    assert (seen.stall, seen.memory.stopping_since) == (None, None)


def test_who_stops_a_run_wants_it_to_stay_so(store, make):
    make(alive=False, status="stopped", ended_at=now_iso(), resume_requested=True)
    assert stop_run(RunStore(store.home), "0123abcd")["status"] == "stopped"
    Monitor(store).tick()
    assert (store.load("0123abcd").status, store.load("0123abcd").attempt) == ("stopped", 1)


def test_a_run_that_cannot_be_asked_to_end_is_not_resumed_one_day(store, make, monkeypatch):
    def refuses(*_):
        raise ServerDownError("away")

    make(limits={"on_stall": "resume"})
    frozen(store, "0123abcd")
    monkeypatch.setattr(stop, "cancel_run", refuses)
    (seen,) = Monitor(store).tick()
    assert "not done: away" in seen.messages
    assert store.load("0123abcd").resume_requested is False


def test_an_ended_run_is_looked_at_once_more_and_then_left(store, make):
    make(alive=False, status="completed", ended_at=now_iso())
    assert len(Monitor(store).tick()) == 1
    assert len(Monitor(store).tick()) == 1, (
        "its last report could not be published, as no server is there"
    )
    store.update("0123abcd", flow_run_id=None)
    assert len(Monitor(store).tick()) == 1
    assert store.load("0123abcd").is_end_handled
    assert Monitor(store).tick() == []


@pytest.mark.parametrize(
    ("policy", "resumes", "again"), [("stop", 0, False), ("resume", 0, True), ("resume", 3, False)]
)
def test_a_crashed_run_is_resumed_if_it_shall_be(store, make, monkeypatch, policy, resumes, again):
    """Three times at most; one that never trained would fail in the same way."""
    without_a_server(monkeypatch)
    ended = {"alive": False, "status": "failed", "ended_at": now_iso(), "auto_resumes": resumes}
    make("0123abcd", limits={"on_crash": policy}, healthy_at=now_iso(), **ended)
    make("4567abcd", limits={"on_crash": policy}, **ended)
    Monitor(store).tick()
    assert (store.load("0123abcd").status == "pending") is again
    is_final = bool((store.load("0123abcd").health or {}).get("final"))
    assert is_final is not again, "a new attempt does not begin with the judgement of an ended one"
    assert store.load("0123abcd").auto_resumes == resumes + again
    assert store.load("4567abcd").status == "failed"


@pytest.mark.parametrize("hours", [0, 3, 1000])
def test_a_crash_that_nobody_has_looked_at_is_never_too_old(store, make, monkeypatch, hours):
    """Laptop and server were away, and `lachesis runs` has noted the end meanwhile."""
    without_a_server(monkeypatch)
    ended_at = (datetime.now(UTC) - timedelta(hours=hours)).isoformat()
    crashed: dict[str, Any] = {"alive": False, "status": "failed", "ended_at": ended_at}
    make(limits={"on_crash": "resume"}, healthy_at=ended_at, **crashed)
    make("4567abcd", limits={"on_crash": "resume"}, is_end_handled=True, **crashed)
    Monitor(store).tick()
    assert store.load("0123abcd").attempt == 2
    assert store.load("4567abcd").attempt == 1, "it was looked at before"


def test_an_attempt_that_dies_while_it_starts_is_tried_again(store, make, monkeypatch):
    """A port or a card may not be free yet; an earlier attempt has shown that the run is sound."""
    without_a_server(monkeypatch)
    make(limits={"on_crash": "resume"}, healthy_at=now_iso(), alive=False)
    for tries in (1, 2, 3):
        end_run(store, store.load("0123abcd"), EndCause.FAILED, "the port is taken")
        Monitor(store).tick()
        again = store.load("0123abcd")
        assert (again.status, again.auto_resumes) == ("pending", tries)
        store.update("0123abcd", status="starting", started_at=now_iso(), healthy_at=None)
    end_run(store, store.load("0123abcd"), EndCause.FAILED, "the port is taken")
    Monitor(store).tick()
    assert store.load("0123abcd").status == "failed", "three times at most"


def test_a_resume_that_cannot_be_submitted_is_tried_again(store, make, monkeypatch):
    long_ago = (datetime.now(UTC) - timedelta(hours=9)).isoformat()
    make(
        limits={"on_crash": "resume"},
        healthy_at=long_ago,
        alive=False,
        status="failed",
        ended_at=long_ago,
    )
    (seen,) = Monitor(store).tick()
    assert any(text.startswith("not done: ") for text in seen.messages), seen.messages
    assert not store.load("0123abcd").is_end_handled
    without_a_server(monkeypatch)
    Monitor(store).tick()
    assert store.load("0123abcd").attempt == 2


def test_a_stop_has_its_cause(store, make, monkeypatch):
    """The flow reads it where no server can be asked."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    make(limits={"on_stall": "stop"})
    frozen(store, "0123abcd")
    Monitor(store).tick()
    record = store.load("0123abcd")
    assert record.stop_cause is EndCause.STALLED
    assert str(record.stop_reason).startswith("stalled: environment since ")
    assert store.dir("0123abcd").stop_file.exists()


def test_a_crashed_run_that_its_user_stopped_stays_so(store, make, monkeypatch):
    without_a_server(monkeypatch)
    make(
        "0123abcd",
        limits={"on_crash": "resume"},
        healthy_at=now_iso(),
        alive=False,
        status="failed",
        ended_at=now_iso(),
    )
    assert "will not be resumed" in stop_run(RunStore(store.home), "0123abcd")["message"]
    Monitor(store).tick()
    assert store.load("0123abcd").status == "failed"


def test_what_an_inference_test_has_left_behind_is_ended(store, make):
    """Also a child that left its parent's process group; not that of a run that lives."""
    make()
    folders = (store.home / "inference_tests" / "0a0a0a0a", store.dir("0123abcd").path)
    folders[0].mkdir(parents=True)
    stray, own = (
        start(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env={**os.environ, MARK_VARIABLE: build_mark(folder)},
            start_new_session=True,
        )
        for folder in folders
    )
    Monitor(store).tick()
    assert not psutil.pid_exists(stray.pid)
    stray.wait(5)
    assert own.poll() is None
