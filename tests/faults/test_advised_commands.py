"""Each kind of advice and of next step, copied into a fresh shell, does what it says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lachesis.base.errors import RunStateError
from lachesis.monitor.observe import observe_files
from lachesis.monitor.run_health import judge_observation
from lachesis.monitor.tick_memory import MonitorMemory
from lachesis.operations.runs import get_status, resume_run
from lachesis.runs.end_causes import EndCause
from lachesis.runs.metrics import MetricsFile
from tests.faults.struck_home import Run
from tests.monitor.advice.runs import COMMAND, FAULTS, list_faulty_steps

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.matrix]
# Fields of the run that an advised command must carry to be accepted, or to be the same task.
SET_FIELDS = {"total_steps": 40, "pause_s": 0.05, "max_batches_offpolicy": 2, "loss_fn": "dro"}


MADE: list[Run] = []


@pytest.fixture
def ended_run(served, in_served_home):
    """A run that was stopped after several checkpoints; one for all tests of the module."""
    if not MADE:
        run = served.start(**SET_FIELDS)
        run.reach("running")
        run.advances(4)
        run.stop()
        MADE.append(run)
    return MADE[0]


def run_in_shell(served, command, folder):
    """Run the command as a user would who has opened a terminal in another folder."""
    program = Path(sys.executable).with_name("lachesis")
    assert program.is_file()
    env = {**served.env(), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    env.pop("LACHESIS_PROFILE", None)
    return subprocess.run(
        ["bash", "-c", command], env=env, cwd=folder, capture_output=True, text=True, timeout=600
    )


def list_advised_commands(run):
    """Return each command that advice about this run names, with the fault that it is for."""
    advised = {}
    for fault, changes in FAULTS.items():
        run.dir.metrics.unlink()
        metrics = MetricsFile(run.dir.metrics)
        for step, values in list_faulty_steps(changes):
            metrics.append(step, values)
        observation = observe_files(run.home.store, run.record)
        for sentence in judge_observation(observation, MonitorMemory()).advice:
            advised |= dict.fromkeys(COMMAND.findall(sentence), fault)
    return advised


def test_advised_commands_work_in_a_fresh_shell(served, ended_run, tmp_path, row):
    saved_metrics = ended_run.dir.metrics.read_bytes()
    commands = list_advised_commands(ended_run)
    ended_run.dir.metrics.write_bytes(saved_metrics)
    kinds = {command.split()[1] for command in commands}
    assert kinds == {"train", "test", "logs", "report"}, "this environment has no gold()"
    assert any("--from" in command for command in commands)
    for command, fault in commands.items():
        runs_before = {record.run_id for record in served.store.all()}
        done = run_in_shell(served, command, tmp_path)
        assert done.returncode == 0, f"{fault}: {command}\n{done.stdout}\n{done.stderr}"
        if command.split()[1] == "train":
            (started,) = (
                record for record in served.store.all() if record.run_id not in runs_before
            )
            assert started.base_model == ended_run.record.base_model
            assert {
                name: started.set_fields.get(name)
                for name in ended_run.record.set_fields
                if f"{name.rpartition('.')[2]}=" not in command.replace(f"{name}=", "")
            }.items() <= ended_run.record.set_fields.items()
            assert started.total_steps == SET_FIELDS["total_steps"]
            Run(served, started.run_id).stop(now=True)
    row(
        fault=f"{len(commands)} advised commands",
        phase="ended",
        expected="each works",
        seen=", ".join(sorted(kinds)),
        kept=ended_run.kept(),
    )


@pytest.mark.parametrize("end", ["stopped", "budget", "invalid groups"])
def test_next_steps_work_in_a_fresh_shell(served, ended_run, tmp_path, row, end):
    """Prove that a plain resume, which a used-up budget refuses, is not offered."""
    run, store = ended_run, served.store
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    config = run.dir.find_effective_config().read_text()
    before = run.record
    if end == "budget":
        run.dir.find_effective_config().write_text(
            config.replace("max_tokens: null", "max_tokens: 10")
        )
        with pytest.raises(RunStateError, match=f"lachesis resume {run.run_id} --set limits.max_t"):
            resume_run(served.store, run.run_id)
    elif end == "invalid groups":
        store.update(
            run.run_id,
            status="failed",
            end_cause=EndCause.INVALID_GROUPS,
            failed_service="environment",
        )
    status = get_status(served.store, run.run_id)
    commands = [command.replace("DIR", str(tmp_path / "out")) for command in status.next_steps]
    resumes = [command for command in commands if command.startswith("lachesis resume")]
    assert bool(resumes) == (end != "invalid groups")
    assert any("env check" in command for command in commands) == (end == "invalid groups")
    assert any(f"logs {run.run_id} env" in command for command in commands) == (
        end == "invalid groups"
    )
    for command in [*(one for one in commands if one not in resumes), *resumes]:
        done = run_in_shell(served, command, tmp_path)
        # The environment of these tests has no gold(), which its check reports as missing.
        allowed_codes = (0, 1) if "env check" in command else (0,)
        assert done.returncode in allowed_codes, f"{command}\n{done.stdout}\n{done.stderr}"
    if resumes:
        run.advances(1)
        run.stop()
    store.update(run.run_id, **before.model_dump(include={"end_cause", "failed_service"}))
    run.dir.find_effective_config().write_text(config)
    row(
        fault=f"next steps after {end}",
        phase="ended",
        expected="each works",
        seen=", ".join(command.split()[1] for command in commands),
        kept=run.kept(),
    )
