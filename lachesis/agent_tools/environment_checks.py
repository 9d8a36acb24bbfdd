"""Check an environment for an agent in a process of its own, as it takes longer than a call may.

A check is kept as a test without a flow run, in `checks/{id}/test.json`; its lines are the stages.
Beside it is whatever `lachesis.environment_check.check` writes. Each call waits for the result for
a limited time.
"""

import shutil
import sys
import time
from pathlib import Path

from lachesis.agent_tools.session import (
    MAX_WAIT_S,
    PROGRESS_INTERVAL_S,
    SCHEMA_TIMEOUT_S,
    ReportProgress,
)
from lachesis.base import paths
from lachesis.base.errors import LachesisError, StorageError, UnknownTestError, shorten
from lachesis.base.files import read_last_lines
from lachesis.base.json_text import Json
from lachesis.base.managed_process import ManagedProcess
from lachesis.base.timestamps import now_iso
from lachesis.config.launch_spec import LaunchSpec, TestSpec
from lachesis.config.owner_policy import load_policy
from lachesis.environment_catalog import lookup, new_environment, requirements
from lachesis.environment_catalog.fingerprint import compute_fingerprint
from lachesis.environment_catalog.scan import scan_environments
from lachesis.operations.environments import CheckResult, run_environment_checks
from lachesis.operations.inference_tests import InferenceRequest, InferenceTest, Stage, open_checks
from lachesis.operations.launches import build_tiny_model, resolve_launch
from lachesis.runs.store import RunStore

MAX_KEPT_CHECKS = 50
POLL_INTERVAL_S = 0.2
LOG_NAME = "log.txt"


def start_check(name: str, *, new: bool, install: bool, model: str | None) -> InferenceTest:
    """Start the check, unless the same check of the same code is already running.

    Args:
        name: The environment.
        new: Whether to create a file of that name from the template first.
        install: Whether to install the requirements of the file first.
        model: A folder with the model that answers; by default the tiny model.

    Raises:
        StorageError: With `new`, an environment of that name exists; nothing was written.
    """
    policy, checks = load_policy(), open_checks()
    policy.require_environments([name])
    if model is not None:
        policy.require_model(model)
    if new:
        _require_free_name(name)
        new_environment.write_scaffold(name, _find_environments_folder())
    environment = lookup.find_environment(name)
    request = InferenceRequest(
        environment=name,
        environment_file=environment.file_path,
        models=[],
        spec=TestSpec(environment=name, model=model, by_agent=True),
    )
    fingerprint = compute_fingerprint(Path(environment.file_path))
    for earlier in checks.all()[:MAX_KEPT_CHECKS]:
        is_same = (earlier.request, earlier.fingerprint) == (request, fingerprint)
        if is_same and read_check(earlier.test_id).status == "running":
            return earlier
    check = checks.create(request, "", fingerprint=fingerprint, status="running")
    _start_process(check, install=install)
    for old in checks.all()[MAX_KEPT_CHECKS:]:
        if not checks.get_run_dir(old.test_id).is_alive():
            shutil.rmtree(checks.dir(old.test_id), ignore_errors=True)
    return check


def _require_free_name(name: str) -> None:
    """Raise StorageError if an environment has this name, because it would be found first."""
    for environment in scan_environments().environments:
        if environment.name == name:
            raise StorageError(
                f"there is an environment {name} already, in {environment.file_path}; nothing was "
                f'written. Choose another name, or check that one: rl_check_environment("{name}")'
            )


def _find_environments_folder() -> Path:
    """Return the last folder that environments are searched in, never the package's own."""
    folders = [folder for folder in paths.environment_dirs() if folder.is_dir()]
    if not folders or folders[-1].is_relative_to(paths.PACKAGE):
        return paths.home() / "environments"
    return folders[-1]


def _start_process(check: InferenceTest, *, install: bool) -> None:
    """Start the process of a check, which goes on when the agent's process ends."""
    checks = open_checks()
    command = [sys.executable, "-P", "-m", "lachesis.agent_tools.environment_checks"]
    command += [check.test_id, *(["--install"] if install else [])]
    # The lock is held as long as the process is alive.
    with checks.get_run_dir(check.test_id).hold_alive_lock() as lock:
        log = checks.dir(check.test_id) / LOG_NAME
        process = ManagedProcess("check", command, log, pass_fds=(lock,))
        process.start()
    process.leave_running()


def read_check(check_id: str) -> InferenceTest:
    """Return the current state of a check; one whose process is gone has failed.

    Raises:
        UnknownTestError: There is no such check.
        StorageError: Its file is damaged.
    """
    checks = open_checks()
    try:
        check = checks.load(check_id)
    except UnknownTestError as error:
        raise UnknownTestError(
            f"there is no check {shorten(repr(check_id), 60)}; rl_check_environment(environment) "
            "starts one"
        ) from error
    if check.has_ended or checks.get_run_dir(check_id).is_alive():
        return check
    log_tail = read_last_lines(checks.dir(check_id) / LOG_NAME, 5)
    reason = f"the process of the check was ended; {log_tail}"
    return check.model_copy(update={"status": "failed", "error": reason})


def wait_for_check(check_id: str, report_progress: ReportProgress) -> Json:
    """Return the results of a check, after waiting at most `MAX_WAIT_S` seconds."""
    started_at, reported_s = time.monotonic(), 0.0
    while (
        not (check := read_check(check_id)).has_ended
        and (elapsed_s := time.monotonic() - started_at) < MAX_WAIT_S
    ):
        if elapsed_s - reported_s > PROGRESS_INTERVAL_S:
            reported_s = elapsed_s
            text = f"{len(check.stages)} checks done"
            report_progress(round(elapsed_s, 1), MAX_WAIT_S, text)
        time.sleep(POLL_INTERVAL_S)
    return _build_answer(check)


def _build_answer(check: InferenceTest) -> Json:
    """Return the answer of the tool: how the check stands, its checks, and what to do next."""
    name, repeat_call = (
        check.request.environment,
        f'rl_check_environment(check_id="{check.test_id}")',
    )
    failures = [f"{line.name}: {line.message}" for line in check.stages if line.status == "failed"]
    problems = [*([check.error] if check.error else []), *failures]
    if not check.has_ended:
        message, steps = f"the check is still running; {repeat_call} waits for it", [repeat_call]
    elif problems:
        message = "; ".join(problems)
        steps = ["fix the file, then call rl_check_environment() again"]
    else:
        message = f"{name} passed every check"
        steps = [f'rl_select_environment(name="{name}")', "rl_test_inference()"]
    return {
        "check_id": check.test_id,
        "status": check.status,
        **({"ok": not problems} if check.has_ended else {}),
        "message": message,
        "environment": name,
        "environment_file": check.request.environment_file,
        "checks": [line.model_dump(mode="json") for line in check.stages],
        "logs": str(open_checks().dir(check.test_id)),
        "next_steps": steps,
    }


def main() -> None:
    """Run one check; this is the entry point of its process."""
    checks = open_checks()
    check = checks.load(sys.argv[1])
    folder, request = checks.dir(check.test_id), check.request

    def record_line(line: CheckResult) -> None:
        check.stages.append(
            Stage(name=line.name, status=line.status, seconds=line.seconds, message=line.message)
        )
        checks.save(check)

    try:
        if "--install" in sys.argv:
            requirements.install_requirements(Path(request.environment_file))
        store = RunStore()
        spec = LaunchSpec(environment=request.environment, model=request.spec.model, by_agent=True)
        resolved = resolve_launch(store, spec, schema_timeout_s=2 * SCHEMA_TIMEOUT_S)
        build_tiny_model(store, resolved.config, lambda done, total: None)
        run_environment_checks(resolved.environment, resolved.config, folder, record_line)
        check.status = "completed"
    except LachesisError as error:
        check.status, check.error = "failed", str(error)
    except Exception as error:
        check.status = "failed"
        check.error = f"an error in Lachesis: {type(error).__name__}: {error}"
        raise
    finally:
        check.ended_at = now_iso()
        checks.save(check)


if __name__ == "__main__":
    main()
