"""What a flow does about the state of its own flow run, at a server that only answers."""

import json
import os
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import Pause

from flows import flow_run_state, train
from lachesis.base.errors import InvalidGroupsError, ProcessExitedError
from lachesis.base.timestamps import now_iso
from lachesis.cli import terminal
from lachesis.cli.commands import run_status
from lachesis.config.run_config import resolve_run_config
from lachesis.launch.resume import begin_next_attempt
from lachesis.operations.runs import ObservedRun
from lachesis.reporting.run_view import RunView
from lachesis.runs.end_causes import CAUSES, EndCause
from lachesis.runs.ending import request_stop
from lachesis.runs.store import RunStore
from lachesis.supervision import stop_requests
from lachesis.supervision.invalid_groups import DeadEnvironmentDetector
from lachesis.supervision.stop_requests import StopCheck, StopRequested
from tests.harness.home import write_run
from tests.harness.http_answers import serve_answers

RUN = "0123abcd"
FLOW_RUN = "6b7b3a56-6a5b-4f0f-9d0b-3b0b0b0b0b0b"


class Prefect:
    """Gives every question about a flow run the same answer, and keeps what it is sent."""

    def __init__(self):
        self.state: dict[str, Any] = {"type": "RUNNING"}
        self.sent: list[Any] = []
        self.later: dict[str, Any] | None = None
        """The state after the next question."""

    def answer(self, request):
        if request.method == "POST":
            self.sent.append(request.json())
            return {"state": self.sent[-1]["state"]}
        state, self.state = self.state, self.later or self.state
        return {"id": FLOW_RUN, "state": state}


@pytest.fixture
def server(monkeypatch):
    prefect = Prefect()
    with serve_answers(prefect.answer) as url:
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        runtime = SimpleNamespace(flow_run=SimpleNamespace(id=FLOW_RUN))
        monkeypatch.setattr(flow_run_state, "runtime", runtime)
        monkeypatch.setattr(flow_run_state, "RUNNER_PID", os.getppid())
        yield prefect


@pytest.fixture
def store(tmp_path):
    store = RunStore(tmp_path)
    write_run(store, run_id=RUN, started_at=now_iso())
    return store


@pytest.mark.parametrize("state", ["PAUSED", "SCHEDULED", "PENDING"])
def test_a_suspension_ends_the_run_also_when_it_was_resumed_meanwhile(server, state):
    flow_run_state.raise_if_stop_requested()
    server.state = {"type": state}
    for _ in range(2):
        with pytest.raises(StopRequested, match="suspended in Prefect; Retry on"):
            flow_run_state.raise_if_stop_requested()


@pytest.mark.parametrize(
    ("earlier", "kept"), [(None, EndCause.SUSPENDED), (EndCause.STALLED, EndCause.STALLED)]
)
def test_a_suspended_run_is_stopped_and_its_flow_run_is_cancelled(
    server, store, monkeypatch, earlier, kept
):
    sentence = CAUSES[kept].sentence
    store.update(RUN, resume_requested=True)
    if earlier:
        request_stop(store, RUN, earlier)
    server.state = {"type": "PAUSED"}
    monkeypatch.setattr(train, "begin_attempt", lambda store, run_id: store.load(run_id))
    with pytest.raises(Pause):
        train._run_and_record_end(store, RUN, 0)
    record = store.load(RUN)
    assert (record.status, record.end_cause, record.error) == ("stopped", kept, sentence)
    assert record.resume_requested is (earlier is not None)
    (sent,) = server.sent
    assert sent["force"] is (earlier is None)
    assert sent["state"]["type"] == "CANCELLED"
    assert sent["state"]["message"] == f"stopped: {sentence}"


def test_other_ends_say_their_reason(server, monkeypatch):
    server.state = {"type": "CANCELLING"}
    with pytest.raises(StopRequested, match="cancelled in Prefect"):
        flow_run_state.raise_if_stop_requested()
    server.state = {"type": "COMPLETED"}
    with pytest.raises(StopRequested, match="marked as completed in Prefect"):
        flow_run_state.raise_if_stop_requested()
    server.state = {"type": "CRASHED"}
    with pytest.raises(ProcessExitedError, match="as crashed; `lachesis resume` continues"):
        flow_run_state.raise_if_stop_requested()
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    flow_run_state.raise_if_stop_requested()
    monkeypatch.setattr(flow_run_state, "RUNNER_PID", 1 << 30)
    with pytest.raises(ProcessExitedError, match="runner of this run was killed"):
        flow_run_state.raise_if_stop_requested()


def test_a_check_that_is_called_often_looks_seldom(store, monkeypatch):
    clock, looks = [100.0], []
    monkeypatch.setattr(stop_requests.time, "monotonic", lambda: clock[0])
    check = StopCheck(store, RUN, lambda: looks.append(clock[0]))
    for _ in range(100):
        check.check_now_and_then()
        clock[0] += 0.1
    assert len(looks) == 3


def test_a_stop_without_a_server_is_a_file_whose_existence_is_asked(store, monkeypatch):
    """Nobody reads the record twenty times a minute to learn of it."""
    check, loads = StopCheck(store, RUN, lambda: None), []
    load = RunStore.load
    monkeypatch.setattr(RunStore, "load", lambda *words: loads.append(1) or load(*words))
    check.check()
    assert loads == []
    request_stop(store, RUN, EndCause.PERSON)
    store.dir(RUN).stop_file.touch()
    with pytest.raises(StopRequested, match="stopped by its user"):
        check.check()
    store.update(RUN, status="stopped")
    config = resolve_run_config("sums", "embedded", {}, model="m")
    begin_next_attempt(store, store.load(RUN), {}, config)
    check.check()


def test_only_counts_of_this_attempt_end_a_run(store):
    """What the environment's process of an attempt before has counted lies in the same file."""
    env = SimpleNamespace(env=SimpleNamespace(group_size=4, batch_size=8))
    config = SimpleNamespace(env=env.env, build_environment_configs=lambda: {"sums": env})
    plan: Any = SimpleNamespace(environment_names={"environment": "sums"}, config=config)
    watch, file = (
        DeadEnvironmentDetector(store, store.load(RUN), plan),
        store.dir(RUN).get_counters_file("environment"),
    )
    watch.check()
    counts = {"failed_groups": 6, "errors": {"KeyError: 'a'": 24}}
    for changed in (
        {"written_at": 1.0},
        {"written_at": 1.0, "rollouts": 1},
        {"written_at": 9e9, "failed_groups": 5},
    ):
        file.write_text(json.dumps({**counts, **changed}))
        watch.check()
    file.write_text(json.dumps({**counts, "written_at": 9e9}))
    with pytest.raises(
        InvalidGroupsError,
        match=r"first 6 groups of sums were invalid, most often by: KeyError: 'a'",
    ):
        watch.check()


def test_an_environment_that_gave_usable_groups_is_never_dead(store):
    """Its counts begin at 0 then, while what scores its answers may be away."""
    env = SimpleNamespace(env=SimpleNamespace(group_size=4, batch_size=8))
    config = SimpleNamespace(env=env.env, build_environment_configs=lambda: {"sums": env})
    plan: Any = SimpleNamespace(environment_names={"environment": "sums"}, config=config)
    file = store.dir(RUN).get_counters_file("environment")
    invalid = json.dumps({"failed_groups": 60, "written_at": 9e9})
    looking, restarting = (
        DeadEnvironmentDetector(store, store.load(RUN), plan),
        DeadEnvironmentDetector(store, store.load(RUN), plan),
    )
    for counts in ({"rollouts": 4, "failed_groups": 2}, {"empty_groups": 1}):
        file.write_text(json.dumps({**counts, "written_at": 9e9}))
        looking.check()
        restarting.remember_usable()
        file.write_text(invalid)
        looking.check()
        restarting.check()
    DeadEnvironmentDetector(store, store.load(RUN), plan, received={"sums": 3}).check()
    for received in (None, {}, {"sums": 0}):
        with pytest.raises(InvalidGroupsError):
            DeadEnvironmentDetector(store, store.load(RUN), plan, received=received).check()


def test_one_dead_environment_of_two_is_named_once(store, caplog, capsys):
    """In the log, in the record, and by `lachesis status`."""
    store.update(
        RUN, additional_environments={"other": {"environment_file": "other.py", "fingerprint": ""}}
    )
    env = SimpleNamespace(env=SimpleNamespace(group_size=4, batch_size=8))
    config = SimpleNamespace(
        env=env.env, build_environment_configs=lambda: {"sums": env, "other": env}
    )
    plan: Any = SimpleNamespace(
        environment_names={"environment": "sums", "environment-other": "other"}, config=config
    )
    watch = DeadEnvironmentDetector(store, store.load(RUN), plan)
    store.dir(RUN).get_counters_file("environment-other").write_text(
        json.dumps({"failed_groups": 60, "written_at": 9e9})
    )
    for _ in range(2):
        watch.check()
    assert [line.message for line in caplog.records if "other.py" in line.message] == [
        "the run waits for another environment: all of the first 60 groups of other were invalid; "
        f"`lachesis env check other.py` runs it without training, and its log is "
        f"{store.dir(RUN).get_log_file('environment-other')}"
    ]
    record = store.load(RUN)
    assert record.dead_environments["other"].startswith(
        "all of the first 60 groups of other were invalid"
    )
    observed = ObservedRun(RunView(record, store.dir(RUN), []), None, None, None)
    terminal.print_answer(Namespace(json=False), {}, run_status.render_status(observed))
    assert "dead" in (shown := capsys.readouterr().out)
    assert "all of the first 60 groups of other were invalid" in " ".join(shown.split())
    store.dir(RUN).get_counters_file("environment-other").write_text(
        '{"failed_groups": 60, "rollouts": 1, "written_at": 9e9}'
    )
    watch.check()
    assert store.load(RUN).dead_environments == {}, "it gives groups again"
