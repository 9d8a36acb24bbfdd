"""Find what dead runs have left on this machine and at a Tinker server, and remove it.

Only what provably belongs to this installation is touched:

processes     that carry the mark of a run or test that has ended, or of a launcher that is gone
files         that were being written when their writer was killed
checkpoints   of ended runs that no manifest names: an interrupted save
sessions      at a Tinker server whose trainer could not end them; they end there without a
              heartbeat
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from pydantic import ValidationError

from lachesis.base.api_keys import read_key
from lachesis.checkpoints.manifests import ENGINE_FOLDER, Manifest
from lachesis.runs.ending import is_elsewhere
from lachesis.runs.folder import RunDir
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.supervision import process_marks

# Environment variable of a launcher's server and runner; it holds the mark of the home.
LAUNCHER_MARK_VARIABLE = "LACHESIS_LAUNCHER"
LAUNCHER_MODULE, RUNNER_MODULE, FLOW_MODULE = (
    "deployments.serve",
    "deployments.runner",
    "prefect.engine",
)
# How long to wait for a runner, which first ends its runs, each with a checkpoint.
RUNNER_TIMEOUT_S = 240.0
CHECK_PREFIX = "lachesis-check-"
# How long the logs of a failed or killed check are kept.
MAX_CHECK_AGE_S = 86400.0


@dataclass(frozen=True)
class Leftover:
    """Describe a leftover; `clean_up` removes it and returns a sentence about the result."""

    description: str
    clean_up: Callable[[], str]


def find_all_leftovers(store: RunStore) -> list[Leftover]:
    """Return everything that is left of runs, tests and launchers that have ended."""
    alive_run_ids = [record.run_id for record in store.all() if store.dir(record.run_id).is_alive()]
    findings = find_launcher_leftovers(store.home, alive_run_ids) + _find_run_processes(store)
    for path in process_marks.find_unfinished(store.home / "models"):
        findings.append(_make_file_leftover(path))
    for record in store.all():
        run_dir = store.dir(record.run_id)
        lives_elsewhere = is_elsewhere(record) and not record.has_ended
        if not run_dir.is_alive() and not lives_elsewhere:
            findings += find_run_leftovers(run_dir, record)
    return findings


def remove_old_checks() -> list[str]:
    """Remove the temporary folders of checks that ended a day ago, and return their paths."""
    root, old_folders = Path(tempfile.gettempdir()), []
    for path in root.glob(f"{CHECK_PREFIX}*"):
        with contextlib.suppress(OSError):
            stat = path.lstat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_mtime > MAX_CHECK_AGE_S:
                old_folders.append(path)
    if old_folders:
        processes_by_folder = process_marks.find_processes(root)
    else:
        processes_by_folder = {}
    in_use = [
        path
        for path in old_folders
        if any(folder.is_relative_to(path) for folder in processes_by_folder)
    ]
    return process_marks.remove_paths([path for path in old_folders if path not in in_use])


def find_run_leftovers(run_dir: RunDir, record: RunRecord) -> list[Leftover]:
    """Return the files and sessions of a run that has ended; processes are found separately."""
    findings = [_make_file_leftover(path) for path in process_marks.find_unfinished(run_dir.path)]
    if record.has_ended:
        findings += [
            _make_file_leftover(path, "saved weights that no checkpoint names")
            for path in _find_unnamed_checkpoints(run_dir)
        ]
        findings += _find_tinker_session(run_dir, record)
    return findings


def _make_file_leftover(path: Path, reason: str = "its writer did not finish it") -> Leftover:
    def clean_up() -> str:
        if process_marks.remove_paths([path]):
            return f"removed {path}"
        return f"{path} could not be removed"

    return Leftover(f"{path}: {reason}", clean_up)


def _make_process_leftover(process: psutil.Process, owner: str) -> Leftover:
    def clean_up() -> str:
        return f"ended {(process_marks.terminate_processes([process]) or [str(process.pid)])[0]}"

    return Leftover(
        f"process {process_marks.describe_process(process)} of {owner}, which has ended", clean_up
    )


def _find_run_processes(store: RunStore) -> list[Leftover]:
    """Return the processes that ended runs and tests have left."""
    findings = []
    for path, processes in process_marks.find_processes(store.home).items():
        if not RunDir(path.parent, path.name).is_alive():
            kind = "run" if path.parent == store.root else "inference test"
            findings += [
                _make_process_leftover(process, f"{kind} {path.name}") for process in processes
            ]
    return findings


def find_flow_processes(home: Path) -> list[psutil.Process]:
    """Return the processes that the runner of a launcher has started for its flow runs."""
    return [process for process, command in _iterate_launched(home) if FLOW_MODULE in command]


def _iterate_launched(home: Path) -> Iterator[tuple[psutil.Process, list[str]]]:
    """Yield the processes of this home's launcher and its runner, with their commands."""
    mark = process_marks.build_mark(home)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(LAUNCHER_MARK_VARIABLE) == mark:
                yield process, process.cmdline()


def find_launcher_leftovers(home: Path, alive_run_ids: Sequence[str] = ()) -> list[Leftover]:
    """Return the leftovers of a killed launcher, the runner before the server.

    The runner needs the server to report how its runs ended.
    """
    runners: list[psutil.Process] = []
    servers: list[psutil.Process] = []
    for process, command in _iterate_launched(home):
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if any(argument.startswith("deployments.") for argument in command) and (
                parent is None or LAUNCHER_MODULE not in parent.cmdline()
            ):
                (runners if RUNNER_MODULE in command else servers).append(process)
    if alive_run_ids:
        runs_note = f"; these runs end with it, each with a checkpoint: {', '.join(alive_run_ids)}"
    else:
        runs_note = ""
    return [
        *(_make_launcher_leftover(launched, runs_note) for launched in runners),
        *(_make_launcher_leftover(launched) for launched in servers),
    ]


def _make_launcher_leftover(process: psutil.Process, runs_note: str = "") -> Leftover:
    """Return a process of a killed launcher as a leftover."""

    def clean_up() -> str:
        description = f"{process_marks.describe_process(process)}{runs_note}"
        with contextlib.suppress(psutil.Error):
            process.terminate()
            psutil.wait_procs([process], timeout=RUNNER_TIMEOUT_S)
        process_marks.terminate_processes([process])
        return f"ended {description}"

    described = process_marks.describe_process(process)
    return Leftover(f"process {described} of a launcher that was killed{runs_note}", clean_up)


def _find_unnamed_checkpoints(run_dir: RunDir) -> list[Path]:
    """Return the saved states of the embedded engine that no manifest of the run names.

    Nothing is returned while a manifest cannot be read, because it may name them.
    """
    named_paths = set()
    try:
        for file in run_dir.checkpoints.glob("step-*"):  # Includes those that were set aside.
            manifest = Manifest.model_validate_json(file.read_bytes())
            named_paths |= {manifest.state, manifest.sampler_weights}
    except (OSError, ValidationError):
        return []
    root = run_dir.path / ENGINE_FOLDER
    saved_folders = [
        checkpoint_file.parent for checkpoint_file in root.glob("*/*/*/checkpoint.json")
    ]
    return [
        saved_folder
        for saved_folder in saved_folders
        if f"tinker://{saved_folder.relative_to(root)}" not in named_paths
    ]


def _find_tinker_session(run_dir: RunDir, record: RunRecord) -> list[Leftover]:
    """Return the session that a killed trainer has left at its server, if any."""
    try:
        session_data = json.loads(run_dir.tinker_session.read_text())
        url, session_id = str(session_data["url"]).rstrip("/"), str(session_data["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return []

    def clean_up() -> str:
        """End the session at its server, and return the outcome in words."""
        key = read_key("TINKER_API_KEY")
        if not key:
            return (
                f"session {session_id} at {url} was not ended: set TINKER_API_KEY to end it; "
                "without a heartbeat it will expire"
            )
        try:
            body = {"reason": {"type": "interrupted"}, "detail": "its trainer was killed"}
            response = httpx.post(
                f"{url}/api/v1/sessions/{session_id}/finish",
                headers={"X-API-Key": key},
                json=body,
                timeout=10,
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"session {session_id} at {url} was not ended: {type(error).__name__}"
        if response.status_code >= 400 and response.status_code not in (404, 410):
            return f"session {session_id} at {url} was not ended: HTTP {response.status_code}"
        run_dir.tinker_session.unlink(missing_ok=True)
        return f"ended session {session_id} at {url}"

    return [Leftover(f"Tinker session {session_id} of run {record.run_id} at {url}", clean_up)]
