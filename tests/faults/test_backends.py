"""An engine of others behind the bridge, and memory that does not suffice."""

import os
import signal
import sys

import pytest

from lachesis.config.launch_spec import LaunchSpec
from lachesis.operations.launches import start_run
from tests.faults.struck_home import EDITS, INTERVAL, Run
from tests.harness.served_home import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]
# Stands for the `uv run -m skyrl.tinker.api` of SkyRL's environment; see deviating_engine.
UV = """#!/bin/sh
cd {root} && exec {python} -m tests.tinker_cloud.deviating_engine --older --with-daemon "$@"
"""
# What Python imports first; every pass over more than a datum fails while the file is there.
OUT_OF_MEMORY = """
import os, sys
if "lachesis.engine" in sys.orig_argv:
    import torch
    from lachesis.engine.adapter_training import TrainingModel
    own = TrainingModel._run_pass
    def run_pass(self, data, *values):
        if len(data) > 1 and os.path.exists({flag!r}):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return own(self, data, *values)
    TrainingModel._run_pass = run_pass
"""


@pytest.fixture(scope="module")
def backend_home(served):
    """A served with an environment of SkyRL, in which a stand-in is started."""
    folder = served.home / "backends" / "skyrl" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    uv = folder / "uv"
    uv.write_text(UV.format(root=ROOT, python=sys.executable))
    uv.chmod(0o755)
    yield served
    served.end_all_runs()


def start(served):
    spec = LaunchSpec(
        environment="steady",
        profile="custom",
        settings={**EDITS, "backend": "skyrl"},
        model=served.model,
        seed=0,
        without_validation=True,
    )
    return Run(served, start_run(served.store, spec).run_id)


@pytest.mark.parametrize("part", ["engine", "backend"], ids=["bridge", "engine behind it"])
def test_bridge_or_engine_is_killed(backend_home, part, row):
    """The daemons that the engine has started, as Ray's, end with the run."""
    run = start(backend_home)
    run.reach("running", part)
    step_before = run.steps()[-1]
    daemons = [pid for pid, text in backend_home.processes().items() if "sleep 8888" in text]
    assert len(daemons) == 1
    backend_home.strike(run.pid(part), signal.SIGKILL)
    record = run.ended()
    assert record.status == "failed"
    assert f"{part} was killed by signal 9" in (record.error or "")
    assert record.failed_service == part
    assert not os.path.exists(f"/proc/{daemons[0]}")
    assert run.kept() > step_before - INTERVAL - 1
    run.resume()
    outcome = f"failed: {part} was killed by signal 9; no daemon left; resumed"
    row(
        fault=f"{'bridge' if part == 'engine' else 'engine behind the bridge'} KILL, with daemons",
        phase="running",
        expected="failed",
        seen=outcome,
        kept=run.kept(),
    )
    assert run.stop().status == "stopped"


def test_memory_does_not_suffice_for_a_pass(served, tmp_path, row):
    flag = tmp_path / "out of memory"
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY.format(flag=str(flag)))
    served.stop_serving()
    served.serve(PYTHONPATH=str(tmp_path))
    try:
        run = served.start()
        run.reach("running")
        attempt = run.record.attempt
        flag.touch()
        run.advances()
        log = run.dir.get_log_file("engine").read_text()
        assert "tokens ran out of memory: CUDA out of memory" in log
        flag.unlink()
        run.advances()
        assert run.record.attempt == attempt
        row(
            fault="out of memory in a pass",
            phase="running",
            expected="trains on",
            seen="trains on by smaller passes",
            kept=run.kept(),
        )
    finally:
        served.end_all_runs()
        served.stop_serving()
