"""Processes that a run has left behind: found by a mark in their environment, which their children inherit and nobody else has;
never by a stored number."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

MARK = "LACHESIS_RUN"
"""The variable in the environment of every process of a run or an inference test that holds its folder."""
PATIENCE_S = 5.0


def processes_under(root: Path) -> dict[Path, list[psutil.Process]]:
    """The living processes of each run and inference test in this folder, by its own. One walk over all processes of this
    user."""
    found: dict[Path, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            folder = process.environ().get(MARK)
            if folder and Path(folder).is_relative_to(root) and process.status() != psutil.STATUS_ZOMBIE:
                found.setdefault(Path(folder), []).append(process)
    return found


def holders(lock: Path) -> list[psutil.Process]:
    """The processes that hold this file open: a run's reaper, after the flow has died."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(Path(one.path) == lock for one in process.open_files()):
                found.append(process)
    return found


def end_all(processes: list[psutil.Process]) -> list[str]:
    """SIGTERM, some seconds, SIGKILL; what was ended, by pid and command. psutil looks at the start time before it signals, so
    a number that the system gave to somebody else meanwhile is safe."""
    told = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            told.append(f"{process.pid} ({' '.join(process.cmdline())[:120]})")
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=PATIENCE_S)
    return told
