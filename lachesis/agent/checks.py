"""A check of an environment for an agent. It takes longer than a call may, so it goes on in a process of its own, and each call
waits for it a while.

checks/{check_id}/check.json  log.txt, and what `lachesis.validation.check` writes there
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from lachesis.agent import schemas
from lachesis.agent.session import SCHEMA_TIMEOUT_S, TEST_WAIT_S, Tell
from lachesis.base import paths
from lachesis.base.errors import ConfigError, LachesisError, StorageError, UnknownTestError, shorten
from lachesis.base.files import storage_errors, read_last_lines, write_private
from lachesis.catalog import describe, requirements, scaffold
from lachesis.catalog.fingerprint import compute_fingerprint
from lachesis.runs.store import RunDir, now_iso
from lachesis.service import LaunchRequest, Service
from lachesis.validation import check as checking

KEPT = 50
POLL_S = 0.2
TELL_S = 2.0


class Check(BaseModel):
    """What is known of one check; its process writes this after each line."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    check_id: str
    environment: str
    environment_file: str
    fingerprint: str
    """Of the code that is checked."""
    install: bool = False
    model: str | None = None
    status: Literal["running", "completed", "failed"] = "running"
    lines: list[schemas.CheckLine] = []
    error: str | None = None
    created_at: str


def begin(name: str, *, new: bool, install: bool, model: str | None) -> Check:
    """Start the check, unless the same one of the same code is going on. With `new`, a file of that name is written first."""
    if new:
        scaffold.write_scaffold(name, _own_folder())
    environment = describe.find_environment(name)
    wanted = Check(
        check_id=secrets.token_hex(4),
        environment=name,
        environment_file=environment.file_path,
        fingerprint=compute_fingerprint(Path(environment.file_path)),
        install=install,
        model=model,
        created_at=now_iso(),
    )
    same = {"environment_file", "fingerprint", "install", "model"}
    for earlier in _newest():
        if earlier.model_dump(include=same) == wanted.model_dump(include=same) and look(earlier.check_id).status == "running":
            return earlier
    folder = _folder(wanted.check_id)
    with storage_errors(folder):
        folder.mkdir(parents=True, mode=0o700)
    _save(wanted)
    with RunDir(folder.parent, folder.name).hold_alive_lock() as lock, (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lachesis.agent.checks", wanted.check_id],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock,),  # while it lives, the check does
            start_new_session=True,  # the agent may go
        )
    threading.Thread(target=process.wait, name="check", daemon=True).start()  # else it would stay as a zombie
    _forget_old()
    return wanted


def look(check_id: str) -> Check:
    """The check as it is now; one whose process is gone has failed. Raises UnknownTestError or StorageError."""
    alive = RunDir(_root(), check_id).is_alive() if check_id.isalnum() else False
    check = _load(check_id)
    if check.status == "running" and not alive:
        said = read_last_lines(_folder(check_id) / "log.txt", 5)
        check = check.model_copy(update={"status": "failed", "error": f"the process of the check was ended; {said}"})
    return check


def wait(check_id: str, tell: Tell) -> schemas.EnvironmentCheck:
    """What the check has found, after so many seconds at most."""
    started, told = time.monotonic(), 0.0
    while (check := look(check_id)).status == "running" and (spent := time.monotonic() - started) < TEST_WAIT_S:
        if spent - told > TELL_S:
            told = spent
            tell(round(spent, 1), TEST_WAIT_S, f"{len(check.lines)} checks done")
        time.sleep(POLL_S)
    return _report(check)


def _report(check: Check) -> schemas.EnvironmentCheck:
    again = f'rl_check_environment(check_id="{check.check_id}")'
    bad = [f"{line.name}: {line.message}" for line in check.lines if line.status == "failed"]
    if check.status == "running":
        message, steps = f"the check goes on; {again} waits for it", [again]
    elif check.error or bad:
        message, steps = "; ".join(filter(None, [check.error, *bad])), ["mend the file, then rl_check_environment() again"]
    else:
        message = f"{check.environment} is sound"
        steps = [f'rl_select_environment(name="{check.environment}")', "rl_test_inference()"]
    return schemas.EnvironmentCheck(
        check_id=check.check_id,
        status=check.status,
        environment=check.environment,
        environment_file=check.environment_file,
        checks=check.lines,
        message=message,
        logs=str(_folder(check.check_id)),
        next_steps=steps,
        **({} if check.status == "running" else {"ok": not (check.error or bad)}),
    )


def _own_folder() -> Path:
    """Where a new file is written: the last folder of LACHESIS_ENVIRONMENTS, else the checkout's own."""
    folders = [place for place in paths.environment_dirs() if place.is_dir()]
    if not folders:
        raise ConfigError("there is no folder of environments; allowed: LACHESIS_ENVIRONMENTS names one")
    return folders[-1]


def _root() -> Path:
    return paths.home() / "checks"


def _folder(check_id: str) -> Path:
    return _root() / check_id


def _load(check_id: str) -> Check:
    file = _folder(check_id) / "check.json"
    if not check_id.isalnum() or not file.is_file():
        raise UnknownTestError(f"there is no check {shorten(repr(check_id), 60)}; rl_check_environment(environment) starts one")
    try:
        return Check.model_validate_json(file.read_bytes())
    except (ValidationError, OSError) as error:
        raise StorageError(f"{file} is damaged ({type(error).__name__}); check again") from error


def _save(check: Check) -> None:
    write_private(_folder(check.check_id) / "check.json", check.model_dump_json(indent=2))


def _newest() -> list[Check]:
    found = []
    for file in sorted(_root().glob("*/check.json"), key=lambda one: one.stat().st_mtime, reverse=True)[:KEPT]:
        try:
            found.append(Check.model_validate_json(file.read_bytes()))
        except (ValidationError, OSError):
            continue  # its own reader is told
    return found


def _forget_old() -> None:
    for folder in sorted(_root().glob("*"), key=lambda one: one.stat().st_mtime, reverse=True)[KEPT:]:
        if not RunDir(_root(), folder.name).is_alive():
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """The process of one check."""
    check = _load(sys.argv[1])

    def tell(line: checking.CheckResult) -> None:
        check.lines.append(schemas.CheckLine(**asdict(line)))
        _save(check)

    try:
        if check.install:
            requirements.install_requirements(Path(check.environment_file))
        service = Service(schema_timeout_s=2 * SCHEMA_TIMEOUT_S)
        launch = LaunchRequest(check.environment, "embedded", model=check.model)
        environment, config = service.resolve(launch)
        service.build_model(config, lambda done, total: None)
        checking.run_environment_checks(environment, config, _folder(check.check_id), tell)
        check.status = "completed"
    except LachesisError as error:
        check.status, check.error = "failed", str(error)
    except Exception as error:
        check.status, check.error = "failed", f"a fault of Lachesis: {type(error).__name__}: {error}"
        raise
    finally:
        _save(check)


if __name__ == "__main__":
    main()
