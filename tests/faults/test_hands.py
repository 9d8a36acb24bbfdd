"""What hands, environments and clients do to a run."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from lachesis.base.errors import LachesisError
from lachesis.base.timestamps import now_iso
from lachesis.monitor.tick import Monitor
from lachesis.operations.runs import get_run, resume_run, stop_run
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.submit import list_parameters
from lachesis.runs.end_causes import EndCause
from lachesis.supervision.invalid_groups import NUM_DEAD_BATCHES
from tests.faults.signals import NOTICED_S
from tests.faults.struck_home import EDITS, INTERVAL
from tests.harness.processes import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]


def test_two_resumes_at_once_give_one_attempt(served, row):
    run = served.take("running")
    run.reach("running")
    attempt = run.stop().attempt
    code = (
        "import sys; from lachesis.operations.runs import resume_run; "
        "from lachesis.runs.store import RunStore; "
        "print(resume_run(RunStore(), sys.argv[1]).flow_run_id)"
    )
    command = [sys.executable, "-c", code, run.run_id]
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(
                subprocess.run, command, env=served.env(), capture_output=True, text=True, cwd=ROOT
            )
            for _ in range(4)
        ]
    answers = {call.result().stdout.strip() for call in calls}
    assert all(call.result().returncode == 0 for call in calls), [
        call.result().stderr for call in calls
    ]
    run.advances()
    assert run.record.attempt == attempt + 1
    assert run.record.flow_run_id in answers
    assert len(answers - {"None", run.record.flow_run_id}) <= 1, (
        "an answer from before the submission has the old flow run"
    )
    served.current = run
    row(
        fault="four resumes at once",
        phase="ended",
        expected="one attempt",
        seen="one attempt",
        kept=run.kept(),
    )


def test_a_copy_of_a_living_run_is_a_new_run(served, row):
    """Prefect's page copies all parameters, the id of the run included."""
    run = served.take("running")
    run.reach("running")
    api = PrefectApi()
    deployment = api.read_deployment("train", "train")
    assert deployment is not None
    run_ids_before = {record.run_id for record in served.store.all()}
    copy = api.create_flow_run(
        deployment["id"],
        name="copy",
        parameters=list_parameters(run.record),
        tags=[],
        key=f"by-hand-{time.time()}",
    )
    (record,) = served.wait(
        lambda: [one for one in served.store.all() if one.run_id not in run_ids_before],
        90,
        "the new run",
    )
    assert record.flow_run_id == copy["id"]
    assert record.environment == run.record.environment
    run.advances()
    assert run.record.flow_run_id != copy["id"]
    stop_run(served.store, record.run_id, now=True)
    served.wait(lambda: get_run(served.store, record.run_id).has_ended, 90, "the end of the copy")
    served.current = run
    row(
        fault="copied in Prefect",
        phase="running",
        expected="a new run",
        seen="a new run",
        kept=run.kept(),
    )


def test_a_retry_in_prefect_goes_on_from_the_checkpoint(served, row):
    """The same flow run, as the retry button and a deployment with retries have it; an attempt of
    its own for the record.
    """
    run = served.take("running")
    run.reach("running")
    attempt, flow_run_id = run.record.attempt, run.record.flow_run_id
    served.strike(run.pid("trainer"), signal.SIGKILL)
    assert run.ended().status == "failed"
    kept = run.kept()

    def ended():
        flow_run = PrefectApi().read_flow_run(flow_run_id or "") or {}
        return flow_run["state"]["type"] == "FAILED"

    served.wait(ended, 30, "the end of the flow run, which comes after the run's")
    state = {
        "type": "SCHEDULED",
        "name": "AwaitingRetry",
        "state_details": {"scheduled_time": now_iso()},
    }
    again = {"state": state, "force": True}
    httpx.post(
        f"{PrefectApi().url}/flow_runs/{flow_run_id}/set_state", json=again, trust_env=False
    ).raise_for_status()
    served.wait(lambda: run.record.attempt > attempt and run.record.resumed, 120, "the resume")
    assert (run.record.attempt, run.record.flow_run_id) == (attempt + 1, flow_run_id)
    assert (run.record.resumed or {})["step"] == kept
    run.advances()
    assert run.seen().status == "running"
    served.current = run
    row(
        fault="retried in Prefect",
        phase="failed",
        expected="goes on",
        seen="resumed by the same flow run",
        kept=run.kept(),
    )


def test_a_run_that_is_marked_as_completed_by_hand_is_stopped(served, row):
    """It has not completed, so that both views of it say that it was stopped."""
    run = served.take("running")
    run.reach("running")
    flow_run_id = run.record.flow_run_id or ""
    PrefectApi().set_state(flow_run_id, {"type": "COMPLETED", "name": "Completed"}, force=True)
    record = run.ended()
    assert record.status == "stopped"
    assert run.kept() == run.steps()[-1]

    def is_cancelled():
        flow_run = PrefectApi().read_flow_run(flow_run_id) or {}
        return bool(flow_run["state"]["type"] == "CANCELLED")

    served.wait(is_cancelled, 30, "the same word in Prefect", 0.2)
    row(
        fault="set to Completed in Prefect",
        phase="running",
        expected="stopped",
        seen="stopped, Cancelled",
        kept=run.kept(),
    )


PHASES = (
    "queued",
    "preparing",
    "waiting for engine",
    "waiting for api",
    "waiting for trainer",
    "waiting for environment",
)


@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_while_it_starts(served, row, phase):
    """No service starts after it, and asking twice is asking once."""
    run = served.start()
    if phase != "queued":
        order = PHASES.index(phase)
        served.wait(
            lambda: PHASES.index(run.record.phase) >= order if run.record.phase in PHASES else True,
            120,
            phase,
            0.01,
        )
    asked = time.monotonic()
    stop_run(served.store, run.run_id)
    begun = set(run.record.services)
    stop_run(served.store, run.run_id)
    record = run.ended()
    assert record.status == "stopped", record.error
    assert all(value.state.startswith("exited") for value in record.services.values())
    late = {name for name in record.services if name not in begun}
    assert len(late) <= 1, f"{late} started after the stop; one may have been on its way"
    row(
        fault="stop",
        phase=phase,
        expected="stopped",
        seen=f"stopped after {time.monotonic() - asked:.0f} s",
        kept=run.kept(),
    )


def test_a_stop_by_prefects_page(served, row):
    run = served.take("running")
    run.reach("running")
    PrefectApi().cancel(run.record.flow_run_id or "", "by hand")
    record = run.ended()
    assert record.status == "stopped"
    assert record.end_cause is EndCause.PREFECT
    assert "cancelled in Prefect" in (record.error or "")
    assert run.kept() == run.steps()[-1]
    row(
        fault="cancel in Prefect",
        phase="running",
        expected="stopped",
        seen="stopped",
        kept=run.kept(),
    )


def test_a_checkpoint_is_cut_off(served, row):
    """The one before it is used, and told."""
    run = served.take("running")
    served.wait(lambda: run.kept() >= 2 * INTERVAL, 120, "two checkpoints")
    served.strike(run.pid("trainer"), signal.SIGKILL)
    run.ended()
    newest = run.checkpoints().find_newest()
    assert newest is not None
    file = run.dir.path / next(name for name in newest.files if name.endswith(".safetensors"))
    os.truncate(file, 100)
    assert 0 < run.kept() < newest.step
    run.resume()
    assert "is damaged and skipped" in run.dir.get_log_file("trainer").read_text()
    served.current = run
    row(
        fault="checkpoint cut off",
        phase="ended",
        expected="the one before",
        seen=f"resumed before {newest.step}",
        kept=run.kept(),
    )


def test_a_fork_goes_on_from_another_runs_weights(served, row):
    """With its optimizer, at step 0; the run that it came from is as it was."""
    run = served.take("running")
    run.reach("running")
    run.stop()
    step, files = run.kept(), sorted(run.dir.engine.rglob("*"))
    fork = served.start(from_checkpoint=f"{run.run_id}@{step}", learning_rate=1e-4)
    served.wait(lambda: fork.record.resumed, 120, "the receipt")
    receipt = fork.record.resumed or {}
    assert (receipt["step"], receipt["groups"]) == (0, 0)
    assert abs(receipt["loss_change"]) < 1e-3
    fork.reach("running")
    assert fork.steps()[0] == 1
    assert fork.record.forked_from == f"{run.run_id}@{step}"
    assert sorted(run.dir.engine.rglob("*")) == files
    served.current = fork
    row(
        fault="fork",
        phase="ended",
        expected="trains on",
        seen=f"from {step} at 0",
        kept=fork.kept(),
    )


def test_the_configuration_is_edited_while_it_trains(served, row):
    """The run goes on with what it was started with; a resume refuses what is none."""
    run = served.take("running")
    run.reach("running")
    good = run.dir.find_effective_config().read_text()
    run.dir.find_effective_config().write_text("env: [")
    run.advances()
    assert run.stop().status == "stopped"
    with pytest.raises(LachesisError, match=r"config\.yaml"):
        resume_run(served.store, run.run_id)
    assert run.record.status == "stopped"
    run.dir.find_effective_config().write_text(good)
    run.resume()
    served.current = run
    row(
        fault="config edited",
        phase="running",
        expected="trains on",
        seen="trains on; refused; resumed",
        kept=run.kept(),
    )


def test_an_environment_that_forks_leaves_nothing(served, row):
    before = set(psutil.pids())
    run = served.start(mode="forks")
    run.reach("running")
    served.strike(run.pid("environment"), signal.SIGKILL)
    began = time.monotonic()
    served.wait(
        lambda: run.record.phase == "restarting environment", NOTICED_S, "the death to be noticed"
    )
    noticed = f"{time.monotonic() - began:.1f}"
    run.advances()
    assert run.stop().status == "stopped"
    found = [one for one in psutil.process_iter(["cmdline"]) if one.pid not in before]
    left = [one for one in found if "time.sleep(3600)" in " ".join(one.info["cmdline"] or [])]
    assert left == []
    row(
        fault="environment forks",
        phase="running",
        expected="no process left",
        seen="none",
        noticed=noticed,
        kept=run.kept(),
    )


def test_a_verifier_that_always_raises_ends_the_run(served, row):
    """After the groups of three batches, with the reason; no policy starts it again."""
    edits = {"mode": "raises", "pause_s": 0.01, "limits.on_crash": "resume"}
    run = served.start(**edits)
    began = time.monotonic()
    record = run.ended(150)
    assert (record.status, record.attempt) == ("failed", 1)
    assert "of steady were invalid, most often by: KeyError at steady.py:" in (record.error or "")
    assert f"`lachesis env check {record.environment_file}`" in (record.error or "")
    assert str(run.dir.get_log_file("environment")) in (record.error or "")
    groups = int((record.error or "").split()[4])
    assert groups >= NUM_DEAD_BATCHES * EDITS["batch_size"] // EDITS["group_size"]
    assert not run.steps()
    Monitor(served.store).tick()
    assert run.seen().status == "failed"
    row(
        fault="a verifier that always raises",
        phase="running",
        expected="failed with the reason",
        seen=f"after {time.monotonic() - began:.0f} s and {groups} groups",
    )
