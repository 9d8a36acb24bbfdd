"""Locate the files of a run, and hold the lock that says whether the run is alive."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lachesis.base.errors import RunStateError
from lachesis.base.files import open_owner_only, storage_errors

RECORD_NAME = "run.json"
# A run that lives notes it more often than this.
SIGN_OF_LIFE_S = 60.0


class RunDir:
    """Hold the paths of one run."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.path = root / run_id
        self.record = self.path / RECORD_NAME
        # What was asked for at the start; it is never rewritten.
        self.config = self.path / "config.yaml"
        # A folder per attempt: where it ran, and the configuration that its processes were given.
        self.attempts = self.path / "attempts"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.engine = self.path / "engine"
        # What `lachesis backend check` had found about the run's server when the run began.
        self.backend_check = self.path / "backend.json"
        # The files of a back end that was started for the run; it begins with an empty folder.
        self.backend = self.path / "backend"
        self.logs = self.path / "logs"
        # What the run is made of, and a copy of its environments' code.
        self.provenance = self.path / "provenance.json"
        self.sources = self.path / "sources"
        self.downloads = self.path / "downloads"
        self.evaluation = self.path / "evaluation"
        # One line for each failed evaluation during training.
        self.failed_evaluations = self.evaluation / "failed.jsonl"
        self.rollouts = self.path / "rollouts"
        # Locked while a flow or a service of the run is alive.
        self.lock = self.path / ".alive"
        # If it exists, the run saves a checkpoint and ends; left where no server can be asked.
        self.stop_file = self.path / "stop"
        # If it exists, processes of the run are killed without time to end by themselves.
        self.stop_now_file = self.path / ".now"
        # The Tinker session of the run while it is open at a remote server.
        self.tinker_session = self.path / "session.json"
        self.server_pause = self.path / "server_pause.json"
        # Usage of the run when its trainer ended; the last line of the metrics is older.
        self.spent = self.path / "spent.json"

    def get_attempt_config(self, attempt: int) -> Path:
        """Return the file of the configuration that the processes of an attempt are given."""
        return self.attempts / str(attempt) / "config.yaml"

    def get_attempt_plan(self, attempt: int) -> Path:
        """Return the file that says where an attempt runs: ports, addresses and paths."""
        return self.attempts / str(attempt) / "plan.json"

    def find_effective_config(self) -> Path:
        """Return the configuration of the newest attempt, or of the request before any."""
        numbers = [int(path.name) for path in self.attempts.glob("[0-9]*") if path.name.isdigit()]
        files = [self.get_attempt_config(number) for number in sorted(numbers, reverse=True)]
        return next((file for file in files if file.is_file()), self.config)

    def get_counters_file(self, service: str) -> Path:
        """Return an environment's counts; see `environment_process.rollout_counters`."""
        return self.path / f"{service}.json"

    def get_position_file(self, service: str) -> Path:
        """Return an environment's position; see `environment_process.dataset_position`."""
        suffix = service.removeprefix("environment")
        return self.path / f"position{suffix}.txt"

    @property
    def counters_files(self) -> list[Path]:
        """Return the counts files of all environments of the run that have started."""
        return sorted(self.path.glob("environment*.json"))

    def get_log_file(self, service: str) -> Path:
        """Return the log file of a service."""
        return self.logs / f"{shorten_service_name(service)}_{self.path.name}.log"

    def get_log_name(self, log: Path) -> str:
        """Return the name by which `lachesis logs` knows a log file of this run."""
        return log.stem.removesuffix(f"_{self.path.name}")

    @contextlib.contextmanager
    def hold_alive_lock(self, timeout_s: float = 60.0) -> Iterator[int]:
        """Mark the run as alive while the yielded file descriptor is open here or in a child.

        One flow holds the lock at a time; a resumed one waits until the services of its predecessor
        are gone.

        Raises:
            RunStateError: Another flow still holds it after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        with storage_errors(self.path), open(self.lock, "w", opener=open_owner_only) as lock:
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    raise RunStateError(
                        f"run {self.path.name} is still held by another flow after {timeout_s:.0f} "
                        f"s"
                    )
                time.sleep(0.2)
            yield lock.fileno()

    def is_alive(self) -> bool:
        """Return whether a flow or a service of this run exists.

        A process id is not enough, because the system reuses it. The lock is tried as a shared one,
        which any number of callers can hold at once, so that they do not mistake each other for the
        run.
        """
        try:
            with open(self.lock) as lock:
                return not try_lock(lock, fcntl.LOCK_SH)
        except FileNotFoundError:
            return False
        except OSError:  # A file system that cannot tell: nobody must be taken for dead.
            return True

    def show_life(self) -> None:
        """Note that a process of the run has just been alive, for when the host was restarted."""
        with contextlib.suppress(OSError):
            os.utime(self.lock)

    def was_alive_lately(self) -> bool:
        """Return whether a process of the run has shown life in the last minute."""
        try:
            return abs(time.time() - self.lock.stat().st_mtime) < SIGN_OF_LIFE_S
        except OSError:
            return False


def try_lock(file: IO[str], operation: int = fcntl.LOCK_EX) -> bool:
    """Try to lock a file without waiting, and return whether it is locked now."""
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def shorten_service_name(service: str) -> str:
    """Return a service's name in file names and in the keys of a status."""
    role, dash, which = service.partition("-")
    if role == "environment":
        return "env" + dash + which
    return service
