"""A flow run finds its run by its key, and a status of one run reads no other run's folder."""

import secrets

import pytest

from lachesis.base.errors import RunStateError
from lachesis.config.launch_spec import LaunchSpec
from lachesis.operations.launches import start_run
from lachesis.operations.runs import get_results, get_status
from lachesis.prefect_client.background_serve import TRAINING_FLOW
from lachesis.prefect_client.flow_run_keys import choose_run_id, derive_run_id, require_free_run
from lachesis.prefect_client.runs_from_prefect import find_or_create_run
from lachesis.prefect_client.submit import find_queue_position, submit_run
from lachesis.runs.end_causes import EndCause
from lachesis.runs.ending import end_run
from lachesis.runs.removal import remove_run
from lachesis.runs.store import RunStore
from tests.harness.home import create_run, make_record

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def deployment(prefect_api, monkeypatch):
    """The deployment `train` of the test's home, which no runner serves."""
    name = secrets.token_hex(4)
    monkeypatch.setenv("LACHESIS_DEPLOYMENT", name)
    monkeypatch.setenv("PREFECT_API_URL", prefect_api.url)
    flow_id = prefect_api._request("POST", "/flows/", {"name": TRAINING_FLOW})["id"]
    body = {"name": f"train-{name}", "flow_id": flow_id}
    return str(prefect_api._request("POST", "/deployments/", body)["id"])


def schedule(api, deployment, key, **parameters):
    flow_run = api.create_flow_run(
        deployment, name=key, parameters=parameters, tags=["lachesis"], key=key
    )
    return str(flow_run["id"])


def test_a_submitted_flow_run_performs_the_run_of_its_key(store, prefect_api, deployment):
    submitted = submit_run(store, create_run(store))
    assert choose_run_id(store, "", submitted.flow_run_id) == submitted.run_id
    assert choose_run_id(store, "00000000", submitted.flow_run_id) == submitted.run_id
    # "Copy to new run" in Prefect copies the parameters and not the key.
    copy = schedule(prefect_api, deployment, "a copy", run_id=submitted.run_id)
    assert choose_run_id(store, submitted.run_id, copy) == derive_run_id(store, copy)
    assert derive_run_id(store, copy) != submitted.run_id


def test_a_flow_run_that_was_started_in_prefect_has_one_run(store):
    first = derive_run_id(store, "a flow run")
    assert derive_run_id(store, "a flow run") == first
    store.create(make_record(run_id=first, made_for_flow_run_id="a flow run"))
    assert derive_run_id(store, "a flow run") == first
    store.update(first, made_for_flow_run_id="another one with the same hash")
    second = derive_run_id(store, "a flow run")
    assert second != first
    store.create(make_record(run_id=second, made_for_flow_run_id="a flow run"))
    assert derive_run_id(store, "a flow run") == second


def test_a_retry_of_an_earlier_attempt_is_refused(store, prefect_api, deployment):
    """Its run has moved on, alive or not, and must not get an attempt more."""
    record = submit_run(store, create_run(store))
    earlier = record.flow_run_id
    require_free_run(store, record, earlier)
    resumed = submit_run(store, store.update(record.run_id, attempt=2, flow_run_id=None))
    for status, advice in (
        ("running", "`lachesis stop"),
        ("pending", "`lachesis stop"),
        ("failed", "`lachesis resume"),
        ("completed", "`lachesis resume"),
    ):
        moved_on = store.update(record.run_id, status=status)
        with pytest.raises(RunStateError, match=f"{status} at attempt 2 as flow run .*{advice}"):
            require_free_run(store, moved_on, earlier)
        require_free_run(store, moved_on, resumed.flow_run_id)


def test_a_resume_of_a_run_that_was_removed_is_refused(store, prefect_api, deployment):
    record = create_run(store, attempt=2, status="failed")
    flow_run_id = schedule(prefect_api, deployment, record.submission_key)
    assert choose_run_id(store, "", flow_run_id) == record.run_id
    remove_run(store, record)
    with pytest.raises(RunStateError, match=f"attempt 2 of run {record.run_id} cannot begin"):
        choose_run_id(store, record.run_id, flow_run_id)


def test_a_retry_of_a_run_that_was_removed_is_refused(store, prefect_api, deployment):
    """Whether it was submitted here or started in Prefect; another one needs a new flow run."""
    values = {"environment": "arithmetic", "steps": 7}
    started = schedule(prefect_api, deployment, "by a form", **values)
    runs = {started: find_or_create_run(store, values, started)}
    submitted = start_run(store, LaunchSpec(environment="arithmetic"))
    runs[str(submitted.flow_run_id)] = submitted
    for flow_run_id, record in runs.items():
        assert find_or_create_run(store, values, flow_run_id).run_id == record.run_id
        remove_run(store, end_run(store, record, EndCause.FAILED))
        with pytest.raises(RunStateError, match=f"run {record.run_id} of this flow run was remov"):
            find_or_create_run(store, values, flow_run_id)


def test_the_queue_is_that_of_prefect_and_no_other_run_is_read(
    store, prefect_api, deployment, monkeypatch
):
    monkeypatch.setenv("LACHESIS_MAX_RUNS", "1")
    submitted = [submit_run(store, create_run(store)) for _ in range(3)]

    def refuse(*_):
        raise AssertionError("the records of all runs are read")

    monkeypatch.setattr(RunStore, "scan", refuse)
    places = [find_queue_position(record, store.home) for record in submitted]
    assert places == [
        None,
        {"place": 1, "running": 0, "limit": 1},
        {"place": 2, "running": 0, "limit": 1},
    ]
    queue = get_status(store, submitted[2].run_id).queue
    assert queue is not None
    assert queue.model_dump() == places[2]
    assert get_results(store, submitted[2].run_id).run_id == submitted[2].run_id
    prefect_api.set_state(str(submitted[0].flow_run_id), {"type": "RUNNING"}, force=True)
    assert find_queue_position(submitted[1], store.home) == {"place": 1, "running": 1, "limit": 1}
