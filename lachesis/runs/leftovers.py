"""What a run has left behind: processes, found by a mark in their environment, and files that were not finished.

The mark holds the folder of the run or inference test and a token that was made for it; children inherit it and nobody else has
it. A process id alone would not do: the system gives it out again.
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

MARK = "LACHESIS_RUN"
TOKEN_FILE = ".mark"
PATIENCE_S = 5.0
UNFINISHED = re.compile(r"\.[^/]+\.\d+\.[0-9a-f]{6}|\.[0-9a-f]{32}")
"""Names under which files and folders of this project are written, before they take their own."""
UNFINISHED_S = 600.0
"""Nothing takes longer to write."""


def mark(folder: Path) -> str:
    """The value of MARK for all processes of this run or test; its token is made at the first call for a folder that is
    there."""
    token = read_or_create_secret(folder / TOKEN_FILE) if folder.is_dir() else secrets.token_urlsafe(8)
    return f"{folder}:{token}"


def processes_under(root: Path) -> dict[Path, list[psutil.Process]]:
    """The living processes of each run and inference test in this folder, by its own. One walk over all processes of this
    user."""
    found: dict[Path, list[psutil.Process]] = {}
    tokens: dict[Path, bytes] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            name, _, token = process.environ().get(MARK, "").rpartition(":")
            folder = Path(name)
            if not name or not folder.is_relative_to(root) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if folder not in tokens:
                tokens[folder] = (folder / TOKEN_FILE).read_bytes().strip()
            if secrets.compare_digest(tokens[folder], token.encode(errors="replace")):
                found.setdefault(folder, []).append(process)
    return found


def holders(lock: Path) -> list[psutil.Process]:
    """The processes that hold this file open: a run's reaper, after the flow has died."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(Path(one.path) == lock for one in process.open_files()):
                found.append(process)
    return found


def describe(process: psutil.Process) -> str:
    """Its id, the start of its command, and where it listens."""
    with contextlib.suppress(psutil.Error):
        ports = [f":{one.laddr.port}" for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        return f"{process.pid} ({' '.join(process.cmdline())[:120]}{', listens on ' if ports else ''}{' '.join(ports)})"
    return str(process.pid)


def end_all(processes: list[psutil.Process]) -> list[str]:
    """SIGTERM, some seconds, SIGKILL; what was ended. psutil looks at the start time before it signals, so a number that the
    system gave to somebody else meanwhile is safe."""
    told = []
    for process in processes:
        said = describe(process)
        with contextlib.suppress(psutil.Error):
            process.terminate()
            told.append(said)
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=PATIENCE_S)
    return told


def unfinished(folder: Path, *, older_than_s: float = UNFINISHED_S) -> list[Path]:
    """Files and folders below this one whose writer died before they were whole; parts of one are not listed by
    themselves."""
    found: list[Path] = []
    for place in sorted(folder.rglob("*")):
        if place.parent in found or not UNFINISHED.fullmatch(place.name):
            continue
        with contextlib.suppress(OSError):
            if time.time() - place.lstat().st_mtime >= older_than_s:
                found.append(place)
    return found


def remove(places: list[Path]) -> list[str]:
    """Delete them; which were there."""
    told = []
    for place in places:
        with contextlib.suppress(OSError):
            shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
            told.append(str(place))
    return told
