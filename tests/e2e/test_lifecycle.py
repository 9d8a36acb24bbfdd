"""Stop, resume, fail: a run's state stays true and no process stays behind. What dies is in
tests/faults.
"""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.harness.served_home import processes_under
from tests.harness.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]
SMALL = (
    "--set",
    "batch_size=32",
    "--set",
    "group_size=8",
    "--set",
    "save_checkpoint_interval=4",
    "--set",
    "use_wandb=false",
)
LONG = (*SMALL, "--set", "total_steps=500", "--set", "final_evaluation=false")

BAD = """
from atroposlib.envs.base import BaseEnv

class Bad(BaseEnv):
    name = "bad"

    async def setup(self):
        raise RuntimeError("the data set is gone")

    async def get_next_item(self):
        return None

    async def evaluate(self, *args, **kwargs):
        pass

if __name__ == "__main__":
    Bad.cli()
"""


def record(home, run_id):
    return dict(json.loads((home / "runs" / run_id / "run.json").read_text()))


def steps(home, run_id):
    file = home / "runs" / run_id / "metrics.jsonl"
    return (
        [json.loads(line)["step"] for line in file.read_text().splitlines()]
        if file.exists()
        else []
    )


@pytest.fixture
def run_processes(served_home):
    return lambda run_id: processes_under(served_home / "runs" / run_id)


def test_a_budget_is_kept_and_with_more_of_it_the_run_goes_on(
    cli, served_home, calm, tmp_path, wait_ended, run_processes, monkeypatch
):
    """A budget of some steps' worth of tokens, its end, a resume with more, a stop: checkpoints
    carry the run, no step is lost or made twice, no process stays. Beside it a run whose
    environment cannot start fails for itself.

    The run begins with examples, as by the README's `--set sft_file=FILE.jsonl`, and another
    run goes on from it at another rate, by the command that `resume` names for other fields.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE.jsonl").write_text('{"prompt": "2+3=", "completion": "5"}\n' * 8)
    (tmp_path / "bad.py").write_text(BAD)
    dead = cli("train", "bad", "--model", "tiny", *LONG, LACHESIS_ENVIRONMENTS=str(tmp_path))[
        "run_id"
    ]
    budget = ("--set", "limits.max_tokens=5000", "--set", "sft_file=FILE.jsonl")
    run_id = cli("train", "calm", "--model", "tiny", *LONG, *budget, LACHESIS_ENVIRONMENTS=calm)[
        "run_id"
    ]
    wait_until(
        lambda: record(served_home, run_id)["status"] == "stopped", 150, "the end of the budget"
    )
    assert record(served_home, run_id)["error"].startswith("budget: ")
    assert (served_home / "runs" / run_id / "sft.json").is_file(), (
        "the trainer has read the examples"
    )
    made = steps(served_home, run_id)
    assert 2 < made[-1] < 30
    assert 5000 <= _spent(served_home, run_id) < 5000 + 4 * _spent(served_home, run_id) / made[-1]
    assert cli("status", run_id)["weights"]["step"] == made[-1], "a stopped run saves where it is"
    refused = cli("resume", run_id, expect=1)
    assert refused["code"] == "run_state"
    assert "has used up its budget" in refused["error"]

    assert cli("resume", run_id, "--set", "limits.max_tokens=500000")["run_id"] == run_id
    wait_until(lambda: len(steps(served_home, run_id)) > len(made), 90, "a step after the resume")
    assert cli("stop", run_id)["status"] == "stopped"
    assert not run_processes(run_id)
    made = steps(served_home, run_id)
    assert made == list(range(1, made[-1] + 1))
    assert record(served_home, run_id)["attempt"] == 2
    assert cli("stop", run_id)["message"].startswith(f"run {run_id} is not running")
    assert record(served_home, dead)["status"] == "failed"
    assert "environment exited with code 1" in record(served_home, dead)["error"]
    assert "the data set is gone" in record(served_home, dead)["error"]
    assert not run_processes(dead)

    words = (*LONG, "--set", "total_steps=2", "--set", "learning_rate=1e-4")
    fork = cli(
        "train", "calm", "--from", f"{run_id}@{made[-1]}", *words, LACHESIS_ENVIRONMENTS=calm
    )
    assert fork["begins_with"] == f"{run_id}@{made[-1]}"
    wait_ended(fork["run_id"])
    assert record(served_home, fork["run_id"])["status"] == "completed", record(
        served_home, fork["run_id"]
    )["error"]
    assert (
        record(served_home, fork["run_id"])["base_model"]
        == record(served_home, run_id)["base_model"]
    )


def _spent(home, run_id):
    """Tokens until the end of the attempt, also those after its last step."""
    kept = json.loads((home / "runs" / run_id / "spent.json").read_text())
    return sum(kept[kind] for kind in ("prefill", "sampled", "trained"))


def test_the_server_fires_schedules(served_home):
    """With SQLAlchemy 2.1 no schedule of Prefect's ever fires, without an error anywhere. The
    monitor has one.
    """
    url = json.loads((served_home / "server.json").read_text())["api_url"]
    deployment = httpx.get(f"{url}/deployments/name/monitor/monitor").json()
    assert [schedule["active"] for schedule in deployment["schedules"]] == [True]
    body = {
        "deployments": {"id": {"any_": [deployment["id"]]}},
        "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
    }

    def scheduled():
        answer = httpx.post(f"{url}/flow_runs/filter", json=body)
        return answer.json() if answer.status_code == 200 else None

    runs = wait_until(scheduled, 60, "a scheduled run")
    assert any(run["auto_scheduled"] for run in runs)


def test_ctrl_c_of_the_demo_leaves_no_process(new_home):
    """Server, runner, flow and services end, after the run has saved a checkpoint."""
    home = new_home()
    env = {**os.environ, "LACHESIS_HOME": str(home)}
    command = [sys.executable, "-m", "lachesis.cli.main", "demo"]
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(
            lambda: list((home / "runs").glob("*/run.json")) if (home / "runs").exists() else [],
            90,
            "a run",
        )
        (file,) = (home / "runs").glob("*/run.json")
        wait_until(lambda: len(steps(home, file.parent.name)) >= 3, 90, "three steps")
    finally:
        os.killpg(process.pid, signal.SIGINT)
    assert process.wait(90) == 130
    wait_until(lambda: not processes_under(home), 30, "the end of every process")
    assert record(home, file.parent.name)["status"] == "stopped"
    assert list((file.parent / "checkpoints").glob("step-*.json"))
