"""A team's own worker trains: Prefect's process worker at a plain Prefect server."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.serve import PREFECT_SETTINGS
from lachesis.runs.store import RunStore
from tests.harness.prefect_server import ROOT, read_state
from tests.harness.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]
PREFECT = [sys.executable, "-m", "prefect", "--no-prompt"]
POOL = "lachesis"


@pytest.fixture
def worker_env(prefect_api, tmp_path, tiny_model):
    home = tmp_path / "home"
    home.mkdir()
    (home / "models").symlink_to(tiny_model / "models")
    settings = {
        "LACHESIS_HOME": str(home),
        "PREFECT_API_URL": prefect_api.url,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }
    return {**os.environ, **PREFECT_SETTINGS, **settings}


def run_prefect(env, *words):
    done = subprocess.run(
        [*PREFECT, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_training_is_run_by_a_worker_of_prefect(prefect_api, worker_env, tmp_path):
    run_prefect(worker_env, "work-pool", "create", POOL, "--type", "process")
    run_prefect(worker_env, "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    names = {(flow, flow) for flow in ("train", "test", "nightly", "monitor")}
    for flow, name in names:
        deployment = prefect_api.read_deployment(flow, name)
        assert deployment is not None
        assert deployment["work_pool_name"] == POOL
    command = [*PREFECT, "worker", "start", "--pool", POOL, "--type", "process"]
    log_file = tmp_path / "worker.log"
    with log_file.open("wb") as log:
        worker = subprocess.Popen(
            command, cwd=ROOT, env=worker_env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        settings = "batch_size=16\ngroup_size=4\ntinker.final_evaluation=false\nuse_wandb=false"
        run_prefect(
            worker_env,
            *("deployment", "run", "train/train", "-p", 'environment="arithmetic"'),
            *("-p", "steps=2", "-p", f"settings={settings!r}".replace("'", '"')),
        )
        store = RunStore(Path(worker_env["LACHESIS_HOME"]))
        records = wait_until(
            lambda: [record for record in store.all() if record.has_ended],
            200, process=worker, log=log_file,
        )  # fmt: skip
        assert (records[0].status, records[0].total_steps) == ("completed", 2), records[0].error
        flow_run_id = records[0].flow_run_id or ""
        wait_until(lambda: read_state(prefect_api, flow_run_id) != "RUNNING", 60, log=log_file)
        assert read_state(prefect_api, flow_run_id) == "COMPLETED"
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.terminate()
        worker.wait(60)
