"""What a run has left behind: processes, found by a mark in their environment, and files that were
not finished.

The mark holds the folder of the run or inference test and a token that was made for it; children
inherit it and nobody else has it. A process id alone would not do: the system gives it out again.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import time
from pathlib import Path

import psutil

from lachesis.base.files import read_or_create_secret

MARK_VARIABLE = "LACHESIS_RUN"
MARK_FILE = ".mark"
TERMINATE_TIMEOUT_S = 5.0
TEMPORARY_NAME = re.compile(r"\.[^/]+\.\d+\.[0-9a-f]{6}|\.[0-9a-f]{32}")
"""Names under which files and folders of this project are written, before they take their own."""
MAX_WRITE_S = 600.0
"""Nothing takes longer to write."""


def build_mark(folder: Path) -> str:
    """The value of MARK for all processes of this run or test; its token is made at the first call
    for a folder that is there.
    """
    token = (
        read_or_create_secret(folder / MARK_FILE) if folder.is_dir() else secrets.token_urlsafe(8)
    )
    return f"{folder}:{token}"


def find_processes(root: Path) -> dict[Path, list[psutil.Process]]:
    """The living processes of each run and inference test in this folder, by its own. One walk over
    all processes of this user.
    """
    processes_by_folder: dict[Path, list[psutil.Process]] = {}
    tokens: dict[Path, bytes] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            folder_name, _, token = process.environ().get(MARK_VARIABLE, "").rpartition(":")
            folder = Path(folder_name)
            if (
                not folder_name
                or not folder.is_relative_to(root)
                or process.status() == psutil.STATUS_ZOMBIE
            ):
                continue
            if folder not in tokens:
                tokens[folder] = (folder / MARK_FILE).read_bytes().strip()
            if secrets.compare_digest(tokens[folder], token.encode(errors="replace")):
                processes_by_folder.setdefault(folder, []).append(process)
    return processes_by_folder


def find_lock_holders(lock: Path) -> list[psutil.Process]:
    """The processes that hold this file open: a run's reaper, after the flow has died."""
    lock_holders = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(Path(open_file.path) == lock for open_file in process.open_files()):
                lock_holders.append(process)
    return lock_holders


def describe_process(process: psutil.Process) -> str:
    """Its id, the start of its command, and where it listens."""
    with contextlib.suppress(psutil.Error):
        ports = [
            f":{connection.laddr.port}"
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        return f"{process.pid} ({' '.join(process.cmdline())[:120]}{', listens on ' if ports else ''}{' '.join(ports)})"
    return str(process.pid)


def terminate_processes(processes: list[psutil.Process]) -> list[str]:
    """SIGTERM, some seconds, SIGKILL; what was ended. psutil looks at the start time before it
    signals, so a number that the system gave to somebody else meanwhile is safe.
    """
    descriptions = []
    for process in processes:
        description = describe_process(process)
        with contextlib.suppress(psutil.Error):
            process.terminate()
            descriptions.append(description)
    _, alive = psutil.wait_procs(processes, timeout=TERMINATE_TIMEOUT_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=TERMINATE_TIMEOUT_S)
    return descriptions


def find_unfinished(folder: Path, *, older_than_s: float = MAX_WRITE_S) -> list[Path]:
    """Files and folders below this one whose writer died before they were whole; parts of one are
    not listed by themselves.
    """
    unfinished_paths: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if path.parent in unfinished_paths or not TEMPORARY_NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime >= older_than_s:
                unfinished_paths.append(path)
    return unfinished_paths


def remove_paths(paths: list[Path]) -> list[str]:
    """Delete them; which were there."""
    removed = []
    for path in paths:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            removed.append(str(path))
    return removed
