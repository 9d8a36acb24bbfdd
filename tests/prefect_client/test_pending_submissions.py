"""A start, a resume and a test are neither lost nor doubled, whatever Prefect answers."""

from datetime import UTC, datetime, timedelta

import pytest

from lachesis.base.errors import LachesisError, RunStateError, ServerDownError, StorageError
from lachesis.base.timestamps import now_iso
from lachesis.config.launch_spec import LaunchSpec, TestSpec
from lachesis.inference_tests import store as inference_test_store
from lachesis.inference_tests.store import InferenceRequest, InferenceTestStore
from lachesis.launch.resume import begin_next_attempt, undo_attempt
from lachesis.operations.launches import start_run
from lachesis.prefect_client import api_requests, pending_submissions, submit
from lachesis.prefect_client.background_serve import TEST_FLOW
from lachesis.prefect_client.flow_run_keys import require_free_run
from lachesis.prefect_client.refresh import refresh_run, refresh_test
from lachesis.prefect_client.resubmit import resubmit_run
from lachesis.prefect_client.runs_from_prefect import find_or_create_test
from lachesis.prefect_client.stop import cancel_run
from lachesis.runs import store as store_module
from lachesis.runs.store import RunStore
from lachesis.spending.ledger import read_ledger
from tests.harness.home import create_run
from tests.prefect_client.late_answers import Fault, delay_answers

pytestmark = pytest.mark.timeout(300)
UNKNOWN: tuple[Fault, ...] = ("answer late", "answer lost", "request lost", "busy")


@pytest.fixture
def faults(server, monkeypatch):
    with delay_answers(server) as faults:
        monkeypatch.setenv("PREFECT_API_URL", faults.url)
        monkeypatch.setenv("LACHESIS_DEPLOYMENT", "test")
        monkeypatch.setattr(api_requests, "TIMEOUT_S", 2.0)
        monkeypatch.setattr(api_requests, "BUSY_RETRY_PAUSES_S", (0.0,))
        monkeypatch.setattr(pending_submissions, "OWN_SUBMISSION_S", 0.0)
        faults.delay_s = 3.0
        yield faults


def create_test(tests):
    request = InferenceRequest(
        environment="sums",
        environment_file="sums.py",
        models=["embedded:m"],
        spec=TestSpec(environment="sums"),
    )
    return tests.create(request, "")


def make_test_deployment(api):
    flow = api._request("POST", "/flows/", {"name": TEST_FLOW})
    api._request("POST", "/deployments/", {"name": "test-test", "flow_id": flow["id"]})


def find_flow_runs(api, key):
    """Return the flow runs that were submitted with a key."""
    body = {"flow_runs": {"idempotency_key": {"any_": [key]}}}
    return [flow_run["id"] for flow_run in api._request("POST", "/flow_runs/filter", body)]


@pytest.mark.parametrize("fault", UNKNOWN)
def test_a_start_without_an_answer_is_sent_until_it_is_known(faults, store, prefect_api, fault):
    """Nothing is said to have failed, and the server has one flow run in the end."""
    faults.fault = fault
    record = submit.submit_run(store, create_run(store))
    assert (record.status, record.flow_run_id) == ("pending", None)
    assert record.phase == submit.UNCONFIRMED
    assert refresh_run(store, record).flow_run_id is None, "still nobody knows"
    faults.fault = "none"
    pending_submissions.send_all(store)
    sent = store.load(record.run_id)
    assert find_flow_runs(prefect_api, f"{record.run_id}-1") == [sent.flow_run_id]
    assert (sent.status, sent.phase) == ("pending", "queued")
    num_submissions = faults.num_submissions
    pending_submissions.send_all(store)
    assert faults.num_submissions == num_submissions, "what is known is not sent again"


@pytest.mark.parametrize("fault", UNKNOWN)
def test_a_resume_without_an_answer_is_never_undone(faults, store, prefect_api, fault):
    faults.fault = fault
    ended = create_run(
        store, status="failed", ended_at=now_iso(), started_at=now_iso(), error="boom"
    )
    resumed = resubmit_run(store, ended)
    assert (resumed.attempt, resumed.status, resumed.flow_run_id) == (2, "pending", None)
    faults.fault = "none"
    sent = refresh_run(store, resumed)
    assert find_flow_runs(prefect_api, f"{ended.run_id}-2") == [sent.flow_run_id]


@pytest.mark.parametrize("fault", UNKNOWN)
def test_a_test_without_an_answer_is_sent_until_it_is_known(faults, store, prefect_api, fault):
    make_test_deployment(prefect_api)
    test = create_test(tests := InferenceTestStore(store.home))
    faults.fault = fault
    submit.submit_test(tests, test)
    assert refresh_test(tests, test).status == "pending"
    assert tests.read_flow_run_id(test.test_id) is None
    faults.fault = "none"
    pending_submissions.send_all(store)
    flow_run_id = tests.read_flow_run_id(test.test_id)
    assert find_flow_runs(prefect_api, test.submission_key) == [flow_run_id]


def test_a_test_is_known_from_its_begin_on_or_refused(faults, store, prefect_api):
    tests = InferenceTestStore(store.home)
    begun, ended = create_test(tests), create_test(tests)
    tests.fail(ended.test_id, pending_submissions.NEVER_SUBMITTED)
    deployment = prefect_api.read_deployment("train", "train-test") or {}
    ids = {
        test.test_id: prefect_api.create_flow_run(
            deployment["id"], name="test", parameters={}, tags=[], key=test.submission_key
        )["id"]
        for test in (begun, ended)
    }
    find_or_create_test(tests, {"test_id": begun.test_id}, ids[begun.test_id])
    assert tests.read_flow_run_id(begun.test_id) == ids[begun.test_id]
    with pytest.raises(RunStateError, match="had failed before it began; start it again"):
        find_or_create_test(tests, {"test_id": ended.test_id}, ids[ended.test_id])


def test_only_a_refusal_takes_a_start_back(faults, store, monkeypatch):
    faults.fault = "refused"
    with pytest.raises(ServerDownError, match="HTTP 409"):
        start_run(store, LaunchSpec(environment="arithmetic"))
    assert store.all() == []
    ended = create_run(store, status="stopped", ended_at=now_iso(), started_at=now_iso())
    with pytest.raises(ServerDownError, match="HTTP 409"):
        resubmit_run(store, ended)
    assert store.load(ended.run_id) == ended
    pending = create_run(store)
    refused = refresh_run(store, pending)
    assert refused.status == "failed"
    assert "HTTP 409" in (refused.error or "")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(ServerDownError, match="does not respond"):
        start_run(store, LaunchSpec(environment="arithmetic"))
    assert len(store.all()) == 2


def test_what_has_gone_on_is_not_undone(faults, store):
    """The flow of a resume may have begun before a second look at the server is refused."""
    ended = create_run(store, status="failed", ended_at=now_iso(), started_at=now_iso())
    queued, former = begin_next_attempt(store, ended, {})
    for changes in ({"status": "starting", "flow_run_id": "f"}, {"attempt": 3}):
        gone_on = store.update(ended.run_id, **changes)
        undo_attempt(store, queued, former)
        assert store.load(ended.run_id) == gone_on
    store.update(ended.run_id, **queued.model_dump(exclude={"run_id"}))
    undo_attempt(store, queued, former)
    assert store.load(ended.run_id) == ended
    assert set(read_ledger(store.home)) == set(), "the promise is taken back too"


def test_a_full_disk_does_not_undo_what_prefect_has_accepted(
    faults, store, prefect_api, monkeypatch
):
    record = create_run(store)

    def refuse(file, text):
        raise StorageError(f"{file}: No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(store_module, "write_private", refuse)
        accepted = submit.submit_run(store, record)
    assert find_flow_runs(prefect_api, f"{record.run_id}-1") == [accepted.flow_run_id]
    assert refresh_run(store, record).flow_run_id == accepted.flow_run_id
    test = create_test(tests := InferenceTestStore(store.home))
    make_test_deployment(prefect_api)
    with monkeypatch.context() as full_disk:
        full_disk.setattr(inference_test_store, "write_private", refuse)
        submit.submit_test(tests, test)
    pending_submissions.send_all(store)
    flow_run_id = tests.read_flow_run_id(test.test_id)
    assert find_flow_runs(prefect_api, test.submission_key) == [flow_run_id]


def test_a_late_start_of_a_run_that_has_ended_is_refused(faults, store, prefect_api):
    """It was stopped, or was pending for a day, while nobody knew that Prefect had accepted it."""
    faults.fault = "answer lost"
    stopped = submit.submit_run(store, create_run(store))
    cancel_run(store, stopped)
    (flow_run_id,) = find_flow_runs(prefect_api, f"{stopped.run_id}-1")
    assert (prefect_api.read_flow_run(flow_run_id) or {})["state"]["type"] == "CANCELLED"
    long_ago = (datetime.now(UTC) - timedelta(days=2)).isoformat()
    forgotten = refresh_run(store, create_run(store, queued_at=long_ago))
    assert forgotten.error == pending_submissions.NEVER_SUBMITTED
    for record in (store.load(stopped.run_id), forgotten):
        with pytest.raises(RunStateError, match=f"`lachesis resume {record.run_id}` starts it"):
            require_free_run(store, record, flow_run_id)


def test_the_runner_goes_on_where_nothing_can_be_sent(store, monkeypatch, caplog):
    def fail(*_):
        raise LachesisError("the records cannot be read")

    monkeypatch.setattr(RunStore, "all", fail)
    pending_submissions.send_all(store)
    assert "the records cannot be read" in caplog.text
