"""Cancel on the page of a flow run, in each phase of a run: one true end, everywhere the same."""

import pytest

from lachesis.operations.run_lists import list_runs
from lachesis.prefect_client.resources import PrefectApi
from tests.faults.struck_home import frozen

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.matrix]
FROZEN_S = 5.0


def wait_phase(run, phase):
    """Wait until the run is starting, evaluates the trained model, or saves a checkpoint."""
    if phase == "saving":
        run.reach("checkpointing")
    elif phase == "starting":
        run.home.wait(lambda: run.record.phase.startswith("waiting for"), 120, phase, 0.02)
    else:
        run.home.wait(lambda: run.record.phase == "evaluating", 150, phase, 0.02)


def read_state(record):
    """Return the name of the state of a run's flow run."""
    flow_run = PrefectApi().read_flow_run(record.flow_run_id or "") or {}
    return str(flow_run["state"]["name"])


@pytest.mark.parametrize("phase", ["queued", "starting", "saving", "evaluating"])
def test_a_cancellation_has_one_true_end(served, row, phase):
    if phase == "queued":
        with frozen(served.part("runner"), FROZEN_S):
            run = served.start()
            answer = PrefectApi().cancel(run.record.flow_run_id or "", "by hand")
        assert answer["state"]["type"] == "CANCELLED", "a run without a process ends at once"
    else:
        edits = {"mode": "evaluates", "total_steps": 3, "final_evaluation": True}
        run = served.start(**(edits if phase == "evaluating" else {}))
        wait_phase(run, phase)
        PrefectApi().cancel(run.record.flow_run_id or "", "by hand")
    record = run.ended()
    served.wait(lambda: read_state(record) != "Cancelling", 60, "the end of the flow run", 0.2)
    assert (record.status, read_state(record)) == ("stopped", "Cancelled"), record.error
    listed = {one.run_id: one.status for one in list_runs(served.store)}
    assert (listed[run.run_id], run.seen().status) == ("stopped", "stopped")
    assert all(service.state.startswith("exited") for service in record.services.values())
    if phase == "saving":
        assert run.kept(), "the checkpoint that was being saved is whole"
    if phase == "evaluating":
        assert run.kept() == 3
    row(
        fault="cancel in Prefect",
        phase=phase,
        expected="stopped, Cancelled",
        seen=f"{record.status}, {read_state(record)}",
        kept=run.kept(),
    )
