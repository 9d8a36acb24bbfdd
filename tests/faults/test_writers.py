"""Two commands, a tool and `serve` write into one home at once, in any order, while Prefect answers
late, wrongly or not at all; record, ledger and flow run agree after each step.
"""

import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lachesis.base.errors import LachesisError, ServerDownError
from lachesis.prefect_client.background_serve import TRAINING_FLOW
from lachesis.prefect_client.flow_run_keys import require_free_run
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.runs_from_prefect import find_or_create_run
from lachesis.runs.store import RunStore
from lachesis.spending.agent_limits import compute_committed_cost
from lachesis.spending.ledger import read_ledger
from tests.faults.writers import ACTIONS, PER_DAY_USD, POLICY, Writer
from tests.harness.prefect_server import give_database, serve_prefect
from tests.harness.waiting import call_again
from tests.prefect_client.late_answers import Fault, LateAnswers, delay_answers
from tests.tinker_cloud.stand_ins import ensure_stand_in

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]
NUM_WRITERS = 4
FAULTS: tuple[Fault, ...] = (
    "none",
    "none",
    "none",
    "answer late",
    "answer lost",
    "request lost",
    "refused",
    "busy",
)
# Starts and ends are what all other actions need.
ACTION_NAMES = (*ACTIONS, "start", "start", "begin", "begin", "end", "resume", "remove")
Step = list[tuple[str, int, int]]
T = TypeVar("T")


@dataclass
class Scene:
    """Hold a home with its server, its writers, and what they have done."""

    store: RunStore
    api: PrefectApi
    deployment_id: str
    faults: LateAnswers
    writers: list[Writer]
    outcomes: Counter[str] = field(default_factory=Counter)


@pytest.fixture
def scene(tmp_path, empty_database, clean_environment, monkeypatch):
    prefect_home, models = tmp_path / "prefect", tmp_path / "hf"
    prefect_home.mkdir()
    give_database(prefect_home, empty_database)
    ensure_stand_in("Qwen/Qwen3-8B", models)
    (clean_environment / "policy.yaml").write_text(POLICY)
    with serve_prefect(prefect_home) as api, delay_answers(api.url) as faults:
        flow = api._request("POST", "/flows/", {"name": TRAINING_FLOW})
        body = {"name": "train-writers", "flow_id": flow["id"]}
        deployment = api._request("POST", "/deployments/", body)
        monkeypatch.setenv("PREFECT_API_URL", api.url)
        monkeypatch.setenv("LACHESIS_DEPLOYMENT", "writers")
        faults.delay_s = 1.5
        writers = [
            Writer(clean_environment, faults.url, "writers", models) for _ in range(NUM_WRITERS)
        ]
        yield Scene(RunStore(clean_environment), api, deployment["id"], faults, writers)
        for writer in writers:
            writer.close()


STEPS = st.tuples(
    st.sampled_from(FAULTS),
    st.lists(
        st.tuples(st.sampled_from(ACTION_NAMES), st.integers(0, 3), st.integers(0, 9)),
        min_size=2,
        max_size=NUM_WRITERS,
    ),
)


def write(scene, fault, step):
    """Let writers act at once while Prefect has this fault."""
    scene.faults.fault = fault
    records = sorted(scene.store.all(), key=lambda record: record.created_at)[-4:]
    begun = []
    for writer, (action, index, number) in zip(scene.writers, step, strict=False):
        run_id = records[index % len(records)].run_id if records else ""
        if action == "start":
            run_id = secrets.token_hex(4)
        begun.append((action, writer.begin(action, run_id, number)))
    for action, future in begun:
        scene.outcomes[f"{action}: {future.result(timeout=60)}"] += 1
    scene.faults.fault = "none"


def assert_records_and_ledger_agree(scene):
    ledger = read_ledger(scene.store.home)
    for record in scene.store.all():
        assert record.has_ended == (record.end_cause is not None), record
        assert record.has_ended == (record.ended_at is not None), record
        # One entry for each attempt, all of which but the last one are known.
        keys = [f"{record.run_id}-{number}" for number in range(1, record.attempt + 1)]
        assert [key for key in keys if key not in ledger] == []
        assert f"{record.run_id}-{record.attempt + 1}" not in ledger
    assert compute_committed_cost(scene.store) <= PER_DAY_USD + 1e-9


def assert_records_and_flow_runs_agree(scene):
    flow_runs = list_flow_runs(scene)
    keys = [flow_run["idempotency_key"] for flow_run in flow_runs]
    assert len(keys) == len(set(keys))
    records = {record.run_id: record for record in scene.store.all()}
    by_id = {flow_run["id"]: flow_run for flow_run in flow_runs}
    for record in records.values():
        if record.flow_run_id is not None:
            assert by_id[record.flow_run_id]["idempotency_key"] == record.submission_key
        elif not record.has_ended:
            assert record.status == "pending", record
    for flow_run in flow_runs:
        if flow_run["state"]["type"] == "SCHEDULED":
            require_known_or_refused(scene.store, records, flow_run)


def list_flow_runs(scene):
    body = {"flow_runs": {"deployment_id": {"any_": [scene.deployment_id]}}}
    return ask_patiently(lambda: list(scene.api._request("POST", "/flow_runs/filter", body)))


def ask_patiently(ask):
    """Return the answer of the real server, which four writers may keep busy for some seconds."""
    return call_again(ask, ServerDownError, poll_s=0.5)


def require_known_or_refused(store, records, flow_run):
    """Check that a flow run that would begin now makes the attempt that its run waits for, or none.

    A run that was removed must not train, and an attempt must not begin a second time.
    """
    run_id, _, attempt = flow_run["idempotency_key"].partition("-")
    record = records.get(run_id)
    is_waited_for = (
        record is not None and record.status == "pending" and str(record.attempt) == attempt
    )

    def may_begin():
        try:
            own_record = find_or_create_run(store, {"run_id": run_id}, flow_run["id"])
            require_free_run(store, own_record, flow_run["id"])
        except ServerDownError:
            raise
        except LachesisError:
            return False
        return True

    assert ask_patiently(may_begin) == is_waited_for, (flow_run, record)


def test_what_writers_leave_at_once_agrees(scene, row):
    # All steps are drawn before the first one: what the writers do to the home must not change what
    # is drawn, which a state machine of Hypothesis would take for an error of its own.
    @settings(max_examples=4, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(program=st.lists(STEPS, min_size=20, max_size=20))
    def run(program):
        for fault, step in program:
            write(scene, fault, step)
            assert_records_and_ledger_agree(scene)
            assert_records_and_flow_runs_agree(scene)

    run()
    done = sum(count for name, count in scene.outcomes.items() if name.endswith(": done"))
    assert all(scene.outcomes[f"{action}: done"] for action in ACTIONS), scene.outcomes
    row(
        fault="four writers at once",
        phase="any",
        expected="they agree",
        seen=f"{done} of {sum(scene.outcomes.values())} actions done, the others refused",
    )
