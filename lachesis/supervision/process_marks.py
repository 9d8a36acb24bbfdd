"""Find what a run has left behind: processes with its mark, and unfinished files.

The mark is an environment variable with the folder of the run or inference test and a random token.
Children inherit it, and no other process has it. A process id is not enough, because the system
reuses it.
"""

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
# Names of files and folders of this project while they are written.
TEMPORARY_NAME = re.compile(r"\.[^/]+\.\d+\.[0-9a-f]{6}|\.[0-9a-f]{32}")
# No file takes longer to write.
MAX_WRITE_S = 600.0


def build_mark(folder: Path) -> str:
    """Return the mark of a run's or a test's processes; the first call creates its token."""
    if folder.is_dir():
        token = read_or_create_secret(folder / MARK_FILE)
    else:
        token = secrets.token_urlsafe(8)
    return f"{folder}:{token}"


def find_processes(root: Path) -> dict[Path, list[psutil.Process]]:
    """Return the living processes of each run and inference test in this folder, in one pass."""
    processes_by_folder: dict[Path, list[psutil.Process]] = {}
    tokens: dict[Path, bytes] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            folder_name, _, token = process.environ().get(MARK_VARIABLE, "").rpartition(":")
            folder = Path(folder_name)
            if (
                not folder_name
                or not folder.is_relative_to(root)
                # A zombie holds nothing any more, and only its parent can remove it.
                or process.status() == psutil.STATUS_ZOMBIE
            ):
                continue
            if folder not in tokens:
                # The token proves that the process was started by the run and not by somebody who
                # knows its folder.
                tokens[folder] = (folder / MARK_FILE).read_bytes().strip()
            if secrets.compare_digest(tokens[folder], token.encode(errors="replace")):
                processes_by_folder.setdefault(folder, []).append(process)
    return processes_by_folder


def find_lock_holders(lock: Path) -> list[psutil.Process]:
    """Return the processes that hold this file open, such as a reaper without its flow."""
    lock_holders = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(Path(open_file.path) == lock for open_file in process.open_files()):
                lock_holders.append(process)
    return lock_holders


def describe_process(process: psutil.Process) -> str:
    """Return a process id with the start of its command and the ports it listens on."""
    with contextlib.suppress(psutil.Error):
        ports = [
            f":{connection.laddr.port}"
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        listens = f", listens on {' '.join(ports)}" if ports else ""
        return f"{process.pid} ({' '.join(process.cmdline())[:120]}{listens})"
    return str(process.pid)


def terminate_processes(processes: list[psutil.Process]) -> list[str]:
    """Send SIGTERM, wait some seconds, send SIGKILL, and describe the ended processes.

    psutil compares the start time before it sends a signal, so a reused process id is safe.
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
    """Return files and folders in this folder whose writer died before they were complete."""
    unfinished_paths: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if path.parent in unfinished_paths or not TEMPORARY_NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime >= older_than_s:
                unfinished_paths.append(path)
    return unfinished_paths


def remove_paths(paths: list[Path]) -> list[str]:
    """Delete these paths, and return those that existed."""
    removed = []
    for path in paths:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            removed.append(str(path))
    return removed
