"""Run a check of an environment in a background process, because it takes longer than a call may.

Each call waits for the result for a limited time. The files are::

    checks/{check_id}/check.json
    checks/{check_id}/log.txt

and whatever `lachesis.environment_check.check` writes there.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from lachesis.agent_tools.draft import MAX_TEST_WAIT_S, SCHEMA_TIMEOUT_S, ReportProgress
from lachesis.agent_tools.schemas import CheckLine, EnvironmentCheck
from lachesis.base import paths
from lachesis.base.errors import LachesisError, StorageError, UnknownTestError, shorten
from lachesis.base.files import read_last_lines, storage_errors, write_private
from lachesis.base.managed_process import ManagedProcess
from lachesis.base.timestamps import now_iso
from lachesis.config.launch_spec import LaunchSpec
from lachesis.config.owner_policy import load_policy
from lachesis.environment_catalog import lookup, new_environment, requirements
from lachesis.environment_catalog.fingerprint import compute_fingerprint
from lachesis.environment_catalog.scan import scan_environments
from lachesis.operations.environments import CheckResult, run_environment_checks
from lachesis.operations.launches import build_tiny_model, resolve_launch
from lachesis.runs.folder import RunDir
from lachesis.runs.store import RunStore

MAX_KEPT_JOBS = 50
POLL_INTERVAL_S = 0.2
PROGRESS_INTERVAL_S = 2.0


class CheckJob(BaseModel):
    """The state of one check. Its process writes this file after each finished line."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    check_id: str
    environment: str
    environment_file: str
    fingerprint: str
    """Fingerprint of the code that is checked."""
    install: bool = False
    model: str | None = None
    status: Literal["running", "completed", "failed"] = "running"
    lines: list[CheckLine] = []
    error: str | None = None
    created_at: str


def start_check_job(name: str, *, new: bool, install: bool, model: str | None) -> CheckJob:
    """Start the check, unless the same check of the same code is already running.

    Args:
        name: The environment.
        new: Whether to create a file of that name from the template first.
        install: Whether to install the requirements of the file first.
        model: A folder with the model that answers; by default the tiny model.

    Raises:
        StorageError: With `new`, an environment of that name exists; nothing was written.
    """
    policy = load_policy()
    policy.require_environments([name])
    if model is not None:
        policy.require_model(model)
    if new:
        _require_free_name(name)
        new_environment.write_scaffold(name, _find_environments_folder())
    environment = lookup.find_environment(name)
    job = CheckJob(
        check_id=secrets.token_hex(4),
        environment=name,
        environment_file=environment.file_path,
        fingerprint=compute_fingerprint(Path(environment.file_path)),
        install=install,
        model=model,
        created_at=now_iso(),
    )
    if running_job := _find_running_job(job):
        return running_job
    _start_process(job)
    _remove_old_jobs()
    return job


def _require_free_name(name: str) -> None:
    """Raise StorageError if an environment has this name, because it would be found first."""
    for environment in scan_environments().environments:
        if environment.name == name:
            raise StorageError(
                f"there is an environment {name} already, in {environment.file_path}; nothing was "
                f'written. Choose another name, or check that one: rl_check_environment("{name}")'
            )


def _find_running_job(job: CheckJob) -> CheckJob | None:
    """Return the job that is doing the same for the same code, if there is one."""
    compared_fields = {"environment_file", "fingerprint", "install", "model"}
    values = job.model_dump(include=compared_fields)
    for earlier_job in _load_newest_jobs():
        if earlier_job.model_dump(include=compared_fields) != values:
            continue
        # A job whose process was killed is still stored as running.
        if refresh_check_job(earlier_job.check_id).status == "running":
            return earlier_job
    return None


def _start_process(job: CheckJob) -> None:
    folder = _get_job_folder(job.check_id)
    with storage_errors(folder):
        folder.mkdir(parents=True, mode=0o700)
    _save_job(job)
    command = [sys.executable, "-P", "-m", "lachesis.agent_tools.environment_checks", job.check_id]
    with RunDir(folder.parent, folder.name).hold_alive_lock() as lock:
        # The lock is held as long as the process is alive.
        process = ManagedProcess("check", command, folder / "log.txt", pass_fds=(lock,))
        process.start()
    process.leave_running()  # The check continues when the agent's process ends.


def refresh_check_job(check_id: str) -> CheckJob:
    """Return the current state of a check; one whose process is gone has failed.

    Raises:
        UnknownTestError: There is no such check.
        StorageError: Its file is damaged.
    """
    if check_id.isalnum():
        alive = RunDir(_get_jobs_folder(), check_id).is_alive()
    else:
        alive = False
    job = _load_job(check_id)
    if job.status == "running" and not alive:
        log_tail = read_last_lines(_get_job_folder(check_id) / "log.txt", 5)
        job = job.model_copy(
            update={"status": "failed", "error": f"the process of the check was ended; {log_tail}"}
        )
    return job


def wait_for_check_job(check_id: str, report_progress: ReportProgress) -> EnvironmentCheck:
    """Return what the check has found, after waiting at most `MAX_TEST_WAIT_S` seconds."""
    started_at, reported_s = time.monotonic(), 0.0
    while (job := refresh_check_job(check_id)).status == "running" and (
        elapsed_s := time.monotonic() - started_at
    ) < MAX_TEST_WAIT_S:
        if elapsed_s - reported_s > PROGRESS_INTERVAL_S:
            reported_s = elapsed_s
            report_progress(round(elapsed_s, 1), MAX_TEST_WAIT_S, f"{len(job.lines)} checks done")
        time.sleep(POLL_INTERVAL_S)
    return _build_answer(job)


def _build_answer(job: CheckJob) -> EnvironmentCheck:
    repeat_call = f'rl_check_environment(check_id="{job.check_id}")'
    failures = [f"{line.name}: {line.message}" for line in job.lines if line.status == "failed"]
    if job.status == "running":
        message, steps = f"the check is still running; {repeat_call} waits for it", [repeat_call]
    elif job.error or failures:
        message, steps = (
            "; ".join(filter(None, [job.error, *failures])),
            ["fix the file, then call rl_check_environment() again"],
        )
    else:
        message = f"{job.environment} passed every check"
        steps = [f'rl_select_environment(name="{job.environment}")', "rl_test_inference()"]
    return EnvironmentCheck(
        check_id=job.check_id,
        status=job.status,
        environment=job.environment,
        environment_file=job.environment_file,
        checks=job.lines,
        message=message,
        logs=str(_get_job_folder(job.check_id)),
        next_steps=steps,
        **({} if job.status == "running" else {"ok": not (job.error or failures)}),
    )


def _find_environments_folder() -> Path:
    """Return the folder for new files: the last one that environments are searched in, but the
    home's rather than the installed package's.
    """
    folders = [folder for folder in paths.environment_dirs() if folder.is_dir()]
    if not folders or folders[-1].is_relative_to(paths.PACKAGE):
        return paths.home() / "environments"
    return folders[-1]


def _get_jobs_folder() -> Path:
    return paths.home() / "checks"


def _get_job_folder(check_id: str) -> Path:
    return _get_jobs_folder() / check_id


def _load_job(check_id: str) -> CheckJob:
    file = _get_job_folder(check_id) / "check.json"
    if not check_id.isalnum() or not file.is_file():
        raise UnknownTestError(
            f"there is no check {shorten(repr(check_id), 60)}; rl_check_environment(environment) "
            f"starts one"
        )
    try:
        return CheckJob.model_validate_json(file.read_bytes())
    except (ValidationError, OSError) as error:
        raise StorageError(f"{file} is damaged ({type(error).__name__}); check again") from error


def _save_job(job: CheckJob) -> None:
    write_private(_get_job_folder(job.check_id) / "check.json", job.model_dump_json(indent=2))


def _load_newest_jobs() -> list[CheckJob]:
    jobs = []
    for file in sorted(
        _get_jobs_folder().glob("*/check.json"), key=lambda path: path.stat().st_mtime, reverse=True
    )[:MAX_KEPT_JOBS]:
        try:
            jobs.append(CheckJob.model_validate_json(file.read_bytes()))
        except (ValidationError, OSError):
            continue  # whoever asks for that check gets the error
    return jobs


def _remove_old_jobs() -> None:
    for folder in sorted(
        _get_jobs_folder().glob("*"), key=lambda path: path.stat().st_mtime, reverse=True
    )[MAX_KEPT_JOBS:]:
        if not RunDir(_get_jobs_folder(), folder.name).is_alive():
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run one check; this is the entry point of its process."""
    job = _load_job(sys.argv[1])

    def record_line(line: CheckResult) -> None:
        job.lines.append(CheckLine(**asdict(line)))
        _save_job(job)

    try:
        if job.install:
            requirements.install_requirements(Path(job.environment_file))
        store = RunStore()
        spec = LaunchSpec(environment=job.environment, model=job.model, by_agent=True)
        resolved = resolve_launch(store, spec, schema_timeout_s=2 * SCHEMA_TIMEOUT_S)
        build_tiny_model(store, resolved.config, lambda done, total: None)
        run_environment_checks(
            resolved.environment,
            resolved.config,
            _get_job_folder(job.check_id),
            record_line,
        )
        job.status = "completed"
    except LachesisError as error:
        job.status, job.error = "failed", str(error)
    except Exception as error:
        job.status, job.error = "failed", f"an error in Lachesis: {type(error).__name__}: {error}"
        raise
    finally:
        _save_job(job)


if __name__ == "__main__":
    main()
