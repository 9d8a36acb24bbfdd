"""What dead runs have left on this machine and at a Tinker server: found, told, and ended where it is provably ours.

processes     that carry the mark of a run or test that does not live, or of a launcher that is gone
files         that were being written when their writer died
checkpoints   of runs that have ended, which no manifest names, so that nobody can go on from them: a save that was cut off
sessions      at a Tinker server whose trainer could not end them; there they would end for want of a heartbeat
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from pydantic import ValidationError

from lachesis.runs import leftovers
from lachesis.runs.checkpoints import ENGINE, Manifest
from lachesis.runs.store import RunDir, RunRecord, RunStore

LAUNCHER_MARK = "LACHESIS_LAUNCHER"
"""The variable in the environment of a launcher's server and runner that holds `leftovers.mark` of the home."""
LAUNCHER, RUNNER, FLOW = "deployments.up", "deployments.runner", "prefect.engine"
RUNNER_S = 240.0
"""The runner ends its runs first, each with a checkpoint."""
CHECK_PREFIX = "lachesis-check-"
CHECK_S = 86400.0
"""The logs of a check that failed or was killed are kept for so long."""


@dataclass(frozen=True)
class Leftover:
    """One finding. `end` gets rid of it and says what was done, or why not."""

    what: str
    end: Callable[[], str]


def find(store: RunStore) -> list[Leftover]:
    """Everything that is left of what does not live any more."""
    living = [record.run_id for record in store.all() if store.dir(record.run_id).is_alive()]
    found = _launcher_processes(store.home, living) + _run_processes(store)
    for place in leftovers.unfinished(store.home / "models"):
        found.append(_file(place))
    for record in store.all():
        folder = store.dir(record.run_id)
        if not folder.is_alive():
            found += of_run(folder, record)
    return found


def remove_old_checks() -> list[str]:
    """Remove the temporary folders of checks that ended a day ago, and return their paths."""
    root, old = Path(tempfile.gettempdir()), []
    for place in root.glob(f"{CHECK_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = place.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > CHECK_S:
                old.append(place)
    living = leftovers.processes_under(root) if old else {}
    in_use = [place for place in old if any(folder.is_relative_to(place) for folder in living)]
    return leftovers.remove([place for place in old if place not in in_use])


def of_run(folder: RunDir, record: RunRecord) -> list[Leftover]:
    """The files and sessions of a run that does not live; the processes of all are found at once."""
    found = [_file(place) for place in leftovers.unfinished(folder.path)]
    if record.ended:
        found += [_file(place, "saved weights that no checkpoint names") for place in _unnamed_checkpoints(folder)]
        found += _session(folder, record)
    return found


def _file(place: Path, why: str = "not finished by its writer") -> Leftover:
    def end() -> str:
        return f"removed {place}" if leftovers.remove([place]) else f"{place} could not be removed"

    return Leftover(f"{place}: {why}", end)


def _process(process: psutil.Process, whose: str) -> Leftover:
    def end() -> str:
        return f"ended {(leftovers.end_all([process]) or [str(process.pid)])[0]}"

    return Leftover(f"process {leftovers.describe(process)} of {whose}, which does not live", end)


def _run_processes(store: RunStore) -> list[Leftover]:
    found = []
    for path, processes in leftovers.processes_under(store.home).items():
        if not RunDir(path.parent, path.name).is_alive():
            kind = "run" if path.parent == store.root else "inference test"
            found += [_process(one, f"{kind} {path.name}") for one in processes]
    return found


def flow_processes(home: Path) -> list[psutil.Process]:
    """Those that the runner of a launcher has started for its flow runs."""
    return [process for process, command in _launched(home) if FLOW in command]


def _launched(home: Path) -> Iterator[tuple[psutil.Process, list[str]]]:
    """What a launcher of this home has started, and what its runner has, each with its command."""
    mark = leftovers.mark(home)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(LAUNCHER_MARK) == mark:
                yield process, process.cmdline()


def _launcher_processes(home: Path, living: list[str]) -> list[Leftover]:
    """Left by a launcher that was killed, the runner before the server, which it needs to tell how its runs ended."""
    runners: list[psutil.Process] = []
    servers: list[psutil.Process] = []
    for process, command in _launched(home):
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if any(one.startswith("deployments.") for one in command) and (parent is None or LAUNCHER not in parent.cmdline()):
                (runners if RUNNER in command else servers).append(process)
    with_them = f"; with it end, each with a checkpoint, the runs {', '.join(living)}" if living else ""
    return [*(_server_or_runner(one, with_them) for one in runners), *(_server_or_runner(one) for one in servers)]


def _server_or_runner(process: psutil.Process, runs: str = "") -> Leftover:
    def end() -> str:
        said = f"{leftovers.describe(process)}{runs}"
        with contextlib.suppress(psutil.Error):
            process.terminate()
            psutil.wait_procs([process], timeout=RUNNER_S)
        leftovers.end_all([process])
        return f"ended {said}"

    return Leftover(f"process {leftovers.describe(process)} of a launcher that was killed{runs}", end)


def _unnamed_checkpoints(folder: RunDir) -> list[Path]:
    """What the embedded engine has saved and no manifest of the run names; nothing while a manifest cannot be read, as it may
    name them."""
    named = set()
    try:
        for file in folder.checkpoints.glob("step-*"):  # also those that were set aside
            manifest = Manifest.model_validate_json(file.read_bytes())
            named |= {manifest.state, manifest.sampler_weights}
    except (OSError, ValidationError):
        return []
    root = folder.path / ENGINE
    saved = [one.parent for one in root.glob("*/*/*/checkpoint.json")]
    return [one for one in saved if f"tinker://{one.relative_to(root)}" not in named]


def _session(folder: RunDir, record: RunRecord) -> list[Leftover]:
    try:
        note = json.loads(folder.session.read_text())
        url, session = str(note["url"]).rstrip("/"), str(note["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return []

    def end() -> str:
        key = os.environ.get("TINKER_API_KEY")
        if not key:
            return f"session {session} at {url} stays: set TINKER_API_KEY to end it; without a heartbeat it ends by itself"
        try:
            body = {"reason": {"type": "interrupted"}, "detail": "its trainer was killed"}
            answer = httpx.post(f"{url}/api/v1/sessions/{session}/finish", headers={"X-API-Key": key}, json=body, timeout=10)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"session {session} at {url} stays: {type(error).__name__}"
        if answer.status_code >= 400 and answer.status_code not in (404, 410):
            return f"session {session} at {url} stays: HTTP {answer.status_code}"
        folder.session.unlink(missing_ok=True)
        return f"ended session {session} at {url}"

    return [Leftover(f"Tinker session {session} of run {record.run_id} at {url}", end)]
