"""Every cause for which a run ends is made here, by what makes it in earnest."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import Pause, TerminationSignal

from deployments import runner
from flows import attempts, flow_run_state, train
from lachesis.base.errors import (
    BillingError,
    InvalidGroupsError,
    ProcessExitedError,
    RunSkippedError,
    ServerDownError,
    ValidationMissingError,
)
from lachesis.base.timestamps import now_iso
from lachesis.monitor.tick import Monitor
from lachesis.operations.runs import stop_run
from lachesis.prefect_client import pending_submissions, refresh, runs_from_prefect, stop
from lachesis.prefect_client.runs_from_prefect import find_or_create_run
from lachesis.runs import ending, host_clock
from lachesis.runs.end_causes import CAUSES, EndCause
from lachesis.runs.ending import has_crashed
from lachesis.runs.host_clock import make_host_fields, read_boot_id
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.supervision.stop_requests import StopRequested
from tests.harness.home import write_run

RUN = "0123abcd"


class Ender:
    """Make a run of one home end."""

    def __init__(self, store, patch):
        self.store, self.patch = store, patch

    def create(self, **values):
        """Make a run whose attempt has begun on this host."""
        begun: dict[str, Any] = {
            "status": "running",
            "started_at": now_iso(),
            "healthy_at": now_iso(),
            "flow_run_id": "11111111-1111-4111-8111-111111111111",
            "prefect_api_url": "http://127.0.0.1:9/api",
            "boot_id": read_boot_id(),
            **make_host_fields(),
        }
        model = {"run_id": RUN, "base_model": "Qwen/Qwen3-8B"}
        return write_run(self.store, **{**model, **begun, **values})

    def by_flow(self, error=None, record=None, **values):
        """Let the flow of a run end, with its services or by an error."""
        record = record or self.create(**values)

        def run_services(*_):
            if error is not None:
                raise error

        self.patch.setattr(train, "begin_attempt", lambda store, run_id: store.load(run_id))
        self.patch.setattr(train, "_run_services", run_services)
        self.patch.setattr(train, "publish_run_verdict", lambda *_: None)
        self.patch.setattr(train, "end_flow_run", lambda state, **_: state)
        with contextlib.suppress(TerminationSignal, SystemExit, KeyError):
            train._run_and_record_end(self.store, record.run_id, 0)
        return self.store.load(record.run_id)

    def by_request(self, cause):
        """Ask a run to end as the monitor does, without a server, and let its flow see it."""
        record = self.create()
        with self.store.dir(RUN).hold_alive_lock():
            stop.cancel_run(self.store, record, cause, f"{cause} in this test")
        ended = self.by_flow(record=record)
        assert (ended.stop_reason, ended.error) == (f"{cause} in this test",) * 2
        return ended

    def by_prefect(self, state):
        """Let the flow see a state of its flow run."""
        self.patch.setattr(flow_run_state, "RUNNER_PID", os.getppid())
        flow_run = SimpleNamespace(flow_run=SimpleNamespace(id="f"))
        self.patch.setattr(flow_run_state, "runtime", flow_run)
        answer = SimpleNamespace(read_flow_run=lambda _: {"state": {"type": state}})
        self.patch.setattr(flow_run_state, "PrefectApi", lambda: answer)
        return self.by_flow()

    def by_end_of_serve(self):
        record = self.create()
        self.patch.setenv("LACHESIS_HOME", str(self.store.home))
        self.patch.setattr(runner, "list_running_ids", lambda _: [record.flow_run_id])
        runner._note_end_of_serve([SimpleNamespace()])  # type: ignore[list-item]
        return self.by_flow(TerminationSignal(signal.SIGTERM), record)

    def by_loss(self, **values):
        """Let somebody look at a run whose flow is gone."""
        return refresh.refresh_run(self.store, self.create(**values))

    def by_stop(self, *, by_agent):
        self.create(status="pending", started_at=None, flow_run_id=None, queued_at=now_iso())
        stop_run(self.store, RUN, by_agent=by_agent)
        return self.store.load(RUN)

    def by_waiting(self):
        long_ago = "2026-01-01T00:00:00+00:00"
        record = self.create(
            status="pending", started_at=None, flow_run_id=None, queued_at=long_ago
        )
        return pending_submissions.send_run(self.store, record)

    def by_schedule(self):
        self.patch.setattr(runs_from_prefect, "_read_schedule", lambda _: "nights")
        parameters = {"environment": "arithmetic"}
        find_or_create_run(self.store, parameters, None)
        with pytest.raises(RunSkippedError):
            find_or_create_run(self.store, parameters, None)
        (skipped,) = [record for record in self.store.all() if record.has_ended]
        return skipped


billing = ProcessExitedError("the trainer ended", cause="billing: no credit is left")
MAKERS: dict[EndCause, Callable[[Ender], RunRecord]] = {
    EndCause.COMPLETED: lambda home: home.by_flow(),
    EndCause.PERSON: lambda home: home.by_stop(by_agent=False),
    EndCause.AGENT: lambda home: home.by_stop(by_agent=True),
    EndCause.PREFECT: lambda home: home.by_prefect("CANCELLING"),
    EndCause.SUSPENDED: lambda home: home.by_prefect("PAUSED"),
    EndCause.SERVE_ENDED: lambda home: home.by_end_of_serve(),
    EndCause.SIGNAL: lambda home: home.by_flow(TerminationSignal(signal.SIGTERM)),
    EndCause.BUDGET: lambda home: home.by_flow(StopRequested(EndCause.BUDGET, "budget: 2 of 1")),
    EndCause.STALLED: lambda home: home.by_request(EndCause.STALLED),
    EndCause.BROKEN_LEARNING: lambda home: home.by_request(EndCause.BROKEN_LEARNING),
    EndCause.NO_MORE_ITEMS: lambda home: home.by_flow(StopRequested(EndCause.NO_MORE_ITEMS)),
    EndCause.SERVER: lambda home: home.by_flow(billing, profile="tinker"),
    EndCause.SKIPPED: lambda home: home.by_schedule(),
    EndCause.INVALID_GROUPS: lambda home: home.by_flow(InvalidGroupsError("all of them")),
    EndCause.NOT_VALIDATED: lambda home: home.by_flow(
        require_validation=True, environment_file=__file__
    ),
    EndCause.FAILED: lambda home: home.by_flow(KeyError("boom")),
    EndCause.SERVE_LOST: lambda home: home.by_flow(SystemExit(1)),
    EndCause.FLOW_LOST: lambda home: home.by_loss(),
    EndCause.HOST_LOST: lambda home: home.by_loss(boot_id="an earlier boot"),
    EndCause.NEVER_SUBMITTED: lambda home: home.by_waiting(),
}


@pytest.fixture
def ender(clean_environment, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    return Ender(RunStore(clean_environment), monkeypatch)


def test_every_cause_has_a_maker():
    assert set(MAKERS) == set(EndCause) == set(CAUSES)
    assert {CAUSES[cause].status for cause in EndCause} == {"completed", "stopped", "failed"}


@pytest.mark.parametrize("cause", EndCause)
def test_a_run_ends_for_a_cause_once(ender, cause):
    ended, rule = MAKERS[cause](ender), CAUSES[cause]
    assert (ended.end_cause, ended.status) == (cause, rule.status)
    assert ender.store.load(ended.run_id).end_cause is cause, "it is on the disk too"
    assert (ended.error is None) == rule.is_wanted
    assert has_crashed(ended) == rule.is_crash
    assert ended.ended_at is not None
    again = ending.end_run(ender.store, ended, EndCause.FAILED, "once more")
    assert again == ender.store.load(ended.run_id) == ended


def test_who_asked_for_the_end_counts_and_not_what_came_of_it(ender):
    """An environment that dies while it is stopped makes no crash, and a completed run is one."""
    ender.create()
    ending.request_stop(ender.store, RUN, EndCause.PERSON)
    ending.request_stop(ender.store, RUN, EndCause.STALLED, "a second reason")
    asked = ender.store.load(RUN)
    assert (asked.stop_cause, asked.stop_reason) == (EndCause.PERSON, "stopped by its user")
    failed = ending.end_run(ender.store, asked, EndCause.FAILED, "boom", service="environment")
    assert (failed.status, failed.error, failed.failed_service) == ("failed", "boom", "environment")
    assert not has_crashed(failed)
    ender.store.update(RUN, status="running", end_cause=None)
    assert ending.end_run(ender.store, asked, EndCause.COMPLETED).status == "completed"
    ender.store.update(RUN, status="running", end_cause=None)
    stopped = ending.end_run(ender.store, asked, EndCause.SIGNAL, unsaved_steps="3 steps are lost")
    assert (stopped.end_cause, stopped.error) == (EndCause.PERSON, "3 steps are lost")


@pytest.mark.parametrize(("step", "cause"), [(9, EndCause.COMPLETED), (8, EndCause.PREFECT)])
def test_a_state_that_a_person_has_set_completes_no_run(ender, monkeypatch, step, cause):
    newest = SimpleNamespace(step=step, is_final=True)
    monkeypatch.setattr(
        refresh, "Checkpoints", lambda _: SimpleNamespace(find_newest=lambda: newest)
    )
    record = ender.create()
    flow_run = {"state": {"type": "COMPLETED"}}
    ended = refresh._refresh_from_server(ender.store, record, str(record.prefect_api_url), flow_run)
    assert ended.end_cause is cause


def test_a_refusal_and_a_suspension_reach_prefect_as_such(ender):
    """The state of the flow run follows from the cause."""
    assert train._fail(ValidationMissingError("test it")) is not None
    cause, sentence = attempts.find_end(ender.store, ender.create(), Pause())
    assert (cause, sentence) == (EndCause.SUSPENDED, None)
    cause, sentence = attempts.find_end(ender.store, ender.store.load(RUN), BillingError("no"))
    assert cause is EndCause.FAILED, "a free run has no provider"


# --- only the run's own host judges


def test_a_run_of_another_host_is_read_and_not_written(ender):
    record = ender.create(host_id="elsewhere", host_name="its-host", boot_id="its boot")
    folder = ender.store.dir(RUN)
    before = folder.record.read_bytes()
    (seen,), warning = refresh.refresh_runs(ender.store, [record])
    assert seen.status == "running"
    assert f"run {RUN} was begun on its-host" in str(warning)
    assert folder.record.read_bytes() == before
    pending = ender.create(
        run_id="4567abcd",
        status="pending",
        flow_run_id=None,
        queued_at="2026-01-01T00:00:00+00:00",
        host_id="elsewhere",
        boot_id=None,
    )
    assert pending_submissions.send_run(ender.store, pending) == pending
    assert Monitor(ender.store).tick() == []


def test_a_person_ends_a_run_whose_host_is_gone(ender):
    """Its home was copied, or moved to another machine."""
    ender.create(host_id="elsewhere", host_name="its-host", boot_id="its boot")
    ender.store.dir(RUN).lock.touch()  # It shows life, so it must be asked.
    with pytest.raises(ServerDownError):
        stop_run(ender.store, RUN)
    os.utime(ender.store.dir(RUN).lock, (1, 1))
    assert "is not running" in stop_run(ender.store, RUN)["message"]
    ended = ender.store.load(RUN)
    assert (ended.end_cause, ended.error) == (
        EndCause.HOST_LOST,
        "it was begun on its-host, and ended here",
    )


def test_the_lock_decides_in_one_boot_and_the_last_sign_of_life_after_it(ender, monkeypatch):
    """Two hosts may have one identity, as machines do that were copied."""
    record, folder = ender.create(), ender.store.dir(RUN)
    with folder.hold_alive_lock():
        assert ending.find_lost_cause(folder, record) is None
    assert ending.find_lost_cause(folder, record) is EndCause.FLOW_LOST
    rebooted = record.model_copy(update={"boot_id": "another"})
    folder.show_life()
    assert ending.find_lost_cause(folder, rebooted) is None
    os.utime(folder.lock, (1, 1))
    assert ending.find_lost_cause(folder, rebooted) is EndCause.HOST_LOST
    in_new_container = record.model_copy(update={"host_id": "the one before"})
    assert ending.find_lost_cause(folder, in_new_container) is EndCause.FLOW_LOST
    monkeypatch.setattr(host_clock, "MACHINE_ID_FILE", Path("/nowhere"))
    assert host_clock.read_host_id()


def test_a_lock_that_cannot_be_read_is_no_proof_of_death(ender):
    record = ender.create()
    assert not ender.store.dir(RUN).is_alive()
    ender.store.dir(RUN).lock.mkdir()
    assert ender.store.dir(RUN).is_alive()
    assert refresh.refresh_run(ender.store, record).status == "running"
