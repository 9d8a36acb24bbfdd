"""The table of a run's services in the Prefect UI says in plain words what they do."""

from lachesis.monitor.observe import Observation
from lachesis.monitor.prefect_artifacts import build_status_rows
from lachesis.monitor.run_history import RunHealth
from lachesis.monitor.tick import WatchedRun
from lachesis.monitor.tick_memory import MonitorMemory
from lachesis.runs.folder import RunDir
from lachesis.runs.record import ServiceRecord
from tests.harness.home import make_record


def list_states_and_details(folder, record, process_state, waiting_for):
    observation = Observation(
        record,
        RunDir(folder, record.run_id),
        process_states={"engine": process_state},
        trainer_health={"waiting_for": waiting_for} if waiting_for else None,
    )
    health = RunHealth(word="healthy", evidence=[])
    watched = WatchedRun(observation, MonitorMemory(), health, stall=None)
    return [(row["state"], row["detail"]) for row in build_status_rows(watched)]


def make_engine(state):
    return {"engine": ServiceRecord(pid=12, log="engine.log", state=state)}


def test_a_running_service_is_shown_with_the_state_of_its_process(tmp_path):
    record = make_record(status="running", phase="training", services=make_engine("running"))
    assert list_states_and_details(tmp_path, record, "sleeping", "rollouts") == [
        ("running", "training; waiting for rollouts"),
        ("running", "sleeping"),
    ]


def test_a_service_that_a_completed_run_has_ended_is_ended_and_not_gone(tmp_path):
    record = make_record(status="completed", phase="done", services=make_engine("exited (-15)"))
    assert list_states_and_details(tmp_path, record, "gone", None) == [
        ("completed", "done"),
        ("ended", ""),
    ]
    record = make_record(status="failed", phase="training", services=make_engine("exited (1)"))
    assert list_states_and_details(tmp_path, record, "gone", None)[1] == ("exited (1)", "")
