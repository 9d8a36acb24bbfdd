"""What a flow run that a schedule of Prefect has made does: it makes a run, or is skipped."""

import pytest

from lachesis.base.errors import FieldValueError, RunSkippedError
from lachesis.prefect_client import runs_from_prefect
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.runs_from_prefect import find_or_create_run
from lachesis.runs.end_causes import EndCause
from lachesis.runs.ending import end_run
from lachesis.runs.store import RunStore
from tests.harness.home import make_record

NIGHTLY = {"environment": "arithmetic", "steps": 5, "name": "my nights"}


@pytest.mark.parametrize(
    ("creator", "name"),
    [
        ({"type": "SCHEDULE", "id": "s", "display_value": "nights"}, "nights"),
        (
            {"type": "SCHEDULE", "id": "0123456789", "display_value": "CronSchedule"},
            "person-01234567",
        ),
        ({"type": "DEPLOYMENT", "id": "d"}, None),
        (None, None),
    ],
)
def test_the_schedule_of_a_flow_run_has_a_name_also_without_a_slug(monkeypatch, creator, name):
    """Prefect's newer page makes schedules without one; the runner gives them this name."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(PrefectApi, "read_flow_run", lambda *_: {"created_by": creator})
    assert runs_from_prefect._read_schedule("flow-run") == name


@pytest.fixture
def store(monkeypatch):
    """Runs of a home whose flow runs are made by the schedule `nights`."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(runs_from_prefect, "_read_schedule", lambda _: "nights")
    return RunStore()


def test_a_scheduled_run_is_skipped_while_the_one_before_it_lives(store):
    other = make_record(run_id="aaaaaaaa", status="running", schedule="days")
    store.create(other)
    first = find_or_create_run(store, NIGHTLY, None)
    assert (first.schedule, first.status) == ("nights", "pending")
    with pytest.raises(RunSkippedError, match=f"skipped: run {first.run_id} of the schedule"):
        find_or_create_run(store, NIGHTLY, None)
    with pytest.raises(RunSkippedError, match="skipped"):
        find_or_create_run(store, NIGHTLY, None)
    # A schedule that starts every five minutes must not fill the list of runs.
    (skipped,) = [one for one in store.all() if one.status == "stopped"]
    assert skipped.evidence == f"skipped: run {first.run_id} of the schedule nights still runs"
    end_run(store, first, EndCause.COMPLETED)
    assert find_or_create_run(store, NIGHTLY, None).status == "pending"


def test_the_first_run_of_a_schedule_starts_from_the_base_model(store):
    parameters = {**NIGHTLY, "from_checkpoint": "best"}
    assert find_or_create_run(store, parameters, None).forked_from is None


def test_the_last_run_of_a_schedule_is_only_known_to_a_schedule(store, monkeypatch):
    monkeypatch.setattr(runs_from_prefect, "_read_schedule", lambda _: None)
    with pytest.raises(FieldValueError, match="from_checkpoint is 'last', which only a schedule"):
        find_or_create_run(store, {**NIGHTLY, "from_checkpoint": "last"}, None)
