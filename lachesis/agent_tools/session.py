"""Keep the state of each session on disk: its draft, its starts, and its last reports.

Whoever connects the agent names its session. Agents with different names do not affect each other;
an agent that is killed and comes back under its name continues where it was. The file is::

    sessions/{name}.json
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lachesis.base import paths
from lachesis.base.errors import ConfigError, RunStateError, StorageError
from lachesis.base.files import hold_file_lock, storage_errors, write_private
from lachesis.config.launch_spec import LaunchSpec, TestSpec

SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
MAX_KEPT_STARTS = 1000
MAX_KEPT_REPORTS = 200
LOCK_TIMEOUT_S = 5.0


def make_session_name(folder: Path | None = None) -> str:
    """Return a session name for an agent that has none: the name of its working folder, so that two
    projects have two sessions.
    """
    working_folder = (folder or Path.cwd()).resolve()
    readable_name = re.sub(r"[^A-Za-z0-9._-]", "-", working_folder.name)[:40].strip(".-") or "root"
    digest = hashlib.sha256(str(working_folder).encode(errors="replace")).hexdigest()
    return f"{readable_name}-{digest[:8]}"


class StartedRun(BaseModel):
    """A run that this session has started; `started_at` is a Unix time."""

    run_id: str
    draft: LaunchSpec
    started_at: float
    key: str | None = None


class LastReport(BaseModel):
    """Keep the last live report about one run; `reported_at` is a Unix time."""

    reported_at: float
    report: dict[str, Any]


class RequestedTest(BaseModel):
    """The last inference test: its options and its id."""

    request: TestSpec
    test_id: str


class SessionState(BaseModel):
    """Everything that is kept of one session."""

    draft: LaunchSpec | None = None
    """What would be started now."""
    starts: list[StartedRun] = []
    last_reports: dict[str, LastReport] = {}
    test: RequestedTest | None = None


class SessionFile:
    """The state file of one session. `change` is atomic, also between processes."""

    def __init__(self, name: str, home: Path | None = None) -> None:
        """Open the session's file.

        Raises:
            ConfigError: The name cannot be used as a file name.
        """
        if not SESSION_NAME.fullmatch(name):
            raise ConfigError(
                f"{name[:100]!r} is not a session name; allowed: 1 to 80 letters, digits, dots, "
                f"dashes and underscores, "
                "the first a letter or digit"
            )
        self.name = name
        self.file = (home or paths.home()) / "sessions" / f"{name}.json"

    def read(self) -> SessionState:
        """Return the state of the session.

        Raises:
            StorageError: The file is damaged. It is then renamed, and the next call gets a new
                session.
        """
        try:
            return self._parse()
        except ValidationError:
            with self._hold_lock():  # another process may have written a valid file meanwhile
                return self._read_or_set_aside()

    def _parse(self) -> SessionState:
        with storage_errors(self.file):
            try:
                return SessionState.model_validate_json(self.file.read_bytes())
            except FileNotFoundError:
                return SessionState()

    def _read_or_set_aside(self) -> SessionState:
        try:
            return self._parse()
        except ValidationError as error:
            with storage_errors(self.file):
                damaged_path = self.file.with_name(
                    f"{self.file.name}.damaged-{int(time.time() * 1000)}"
                )
                os.replace(self.file, damaged_path)
            raise StorageError(
                f"the state of session {self.name} was damaged ({error.errors()[0]['msg']}) and is "
                f"kept in {damaged_path}; "
                "the session starts empty: select an environment again"
            ) from error

    @contextlib.contextmanager
    def change(self) -> Iterator[SessionState]:
        """Yield the state for changing in place, and write it when the block ends without an error.

        Raises:
            RunStateError: Another call of this session takes too long.
        """
        with self._hold_lock():
            state = self._read_or_set_aside()
            original = state.model_copy(deep=True)
            yield state
            # an unchanged state is not written again, because a write can fail
            if state not in (original, self._parse()):
                self.write(state)

    def write(self, state: SessionState) -> None:
        """Replace the file inside `change`, for what must be kept even if the process is killed."""
        state.starts = state.starts[-MAX_KEPT_STARTS:]
        reports = state.last_reports
        newest_run_ids = sorted(reports, key=lambda run_id: reports[run_id].reported_at)
        state.last_reports = {
            run_id: reports[run_id] for run_id in newest_run_ids[-MAX_KEPT_REPORTS:]
        }
        write_private(self.file, state.model_dump_json(indent=2))

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        with storage_errors(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        timeout_error = RunStateError(
            f"another call of session {self.name} has not ended after {LOCK_TIMEOUT_S:.0f} s; try "
            "again"
        )
        lock_file = self.file.with_name(f".{self.name}.lock")
        with hold_file_lock(lock_file, timeout_s=LOCK_TIMEOUT_S, timeout_error=timeout_error):
            yield
