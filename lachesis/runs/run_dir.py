"""The folder of a run: the paths of its files, and the lock that says whether the run is alive."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lachesis.base.errors import RunStateError
from lachesis.base.files import open_owner_only, storage_errors


class RunDir:
    """The paths of one run."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.path = root / run_id
        self.record = self.path / "run.json"
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.engine = self.path / "engine"
        self.logs = self.path / "logs"
        self.evaluation = self.path / "evaluation"
        self.failed_evaluations = self.evaluation / "failed.jsonl"
        """Why evaluations during training failed, a line each."""
        self.rollouts = self.path / "rollouts.jsonl"
        self.lock = self.path / ".alive"
        """Locked while a flow or a service of the run lives."""
        self.stop_now_file = self.path / ".now"
        """While it is there, processes of the run that shall end are given no time to do so."""
        self.tinker_session = self.path / "session.json"
        """The Tinker session of the run, while it is open at a server of somebody else."""
        self.spent = self.path / "spent.json"
        """Tokens and money of the run until its trainer ended; the last line of the metrics is
        older.
        """

    def get_counters_file(self, service: str) -> Path:
        """What the process of an environment counts about itself; see
        `lachesis.env_process.counters`.
        """
        return self.path / f"{service}.json"

    def get_position_file(self, service: str) -> Path:
        """Where an environment stands in its items; see `lachesis.env_process.dataset_position`."""
        return self.path / f"cursor{service.removeprefix('environment')}.txt"

    @property
    def counters_files(self) -> list[Path]:
        """Of all environments of the run that have begun to count."""
        return sorted(self.path.glob("environment*.json"))

    def get_log_file(self, service: str) -> Path:
        return self.logs / f"{shorten_service_name(service)}_{self.path.name}.log"

    @contextlib.contextmanager
    def hold_alive_lock(self, timeout_s: float = 60.0) -> Iterator[int]:
        """Hold the run: while the yielded file descriptor is open here, or in a child that was
        given it, the run lives. One flow at a time; a resumed one waits until the last services of
        its predecessor are gone. Raises RunStateError.
        """
        deadline = time.monotonic() + timeout_s
        with storage_errors(self.path), open(self.lock, "w", opener=open_owner_only) as lock:
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    raise RunStateError(
                        f"run {self.path.name} is still held by another flow after {timeout_s:.0f} s"
                    )
                time.sleep(0.2)
            yield lock.fileno()

    def is_alive(self) -> bool:
        """Return whether a flow or a service of this run exists.

        A process id would not do: the system gives it out again. The lock is tried as a shared one,
        which any number of callers may hold at once, so that they do not take each other for a run.
        """
        try:
            with open(self.lock) as lock:
                return not try_lock(lock, fcntl.LOCK_SH)
        except OSError:
            return False


def try_lock(file: IO[str], operation: int = fcntl.LOCK_EX) -> bool:
    """Take the lock without waiting; return whether it is held now."""
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def shorten_service_name(service: str) -> str:
    """A service's name in file names and in the keys of a status."""
    role, dash, which = service.partition("-")
    return "env" + dash + which if role == "environment" else service
