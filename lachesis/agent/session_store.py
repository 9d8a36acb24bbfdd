"""What an agent has chosen and asked, per session, on disk: its draft, its starts, when it last
looked at each run.

A session is named by whoever connects the agent. Two agents with two names do not disturb each
other; one that is killed and comes back under its name goes on where it was.

sessions/{name}.json
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lachesis.base import paths
from lachesis.base.errors import ConfigError, RunStateError, StorageError
from lachesis.base.files import storage_errors, write_private

SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
MAX_KEPT_STARTS = 1000
MAX_KEPT_REPORTS = 200
LOCK_TIMEOUT_S = 5.0


def make_session_name(folder: Path | None = None) -> str:
    """A name for an agent that nobody named: that of the folder it works in, so that two projects
    are two sessions.
    """
    working_folder = (folder or Path.cwd()).resolve()
    readable_name = re.sub(r"[^A-Za-z0-9._-]", "-", working_folder.name)[:40].strip(".-") or "root"
    return f"{readable_name}-{hashlib.sha256(str(working_folder).encode(errors='replace')).hexdigest()[:8]}"


class Draft(BaseModel):
    """What would be started now. `edits` maps section.field to its value."""

    model_config = ConfigDict(frozen=True)

    environment: str
    profile: str
    model: str | None = None
    edits: dict[str, Any] = {}
    start_from: str | None = None
    """The checkpoint to begin from; of a draft that is started, not of one that is edited."""


class StartedRun(BaseModel):
    """A run that this session has started; `at` in seconds since 1970."""

    run_id: str
    draft: Draft
    at: float
    key: str | None = None


class LastReport(BaseModel):
    """The last live report about one run."""

    at: float
    report: dict[str, Any]


class RequestedTest(BaseModel):
    """The last inference test: what was asked, and its id."""

    asked: dict[str, Any]
    test_id: str


class SessionState(BaseModel):
    """Everything that is kept of one session."""

    draft: Draft | None = None
    starts: list[StartedRun] = []
    checks: dict[str, LastReport] = {}
    test: RequestedTest | None = None


class SessionFile:
    """One agent's state. `change` is atomic, also between processes."""

    def __init__(self, name: str, home: Path | None = None) -> None:
        """Raises ConfigError for a name that is no plain file name."""
        if not SESSION_NAME.fullmatch(name):
            raise ConfigError(
                f"{name[:100]!r} is no session name; allowed: 1 to 80 letters, digits, dots, dashes and underscores, "
                "the first a letter or digit"
            )
        self.name = name
        self.file = (home or paths.home()) / "sessions" / f"{name}.json"

    def read(self) -> SessionState:
        """Raises StorageError when the file is damaged; it is then kept aside, and the next call
        finds a new session.
        """
        try:
            return self._parse()
        except ValidationError:
            with self._hold_lock():  # it may have been replaced by a good one meanwhile
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
                f"the state of session {self.name} was damaged ({error.errors()[0]['msg']}) and is kept in {damaged_path}; "
                "the session begins anew: select an environment again"
            ) from error

    @contextlib.contextmanager
    def change(self) -> Iterator[SessionState]:
        """The state, to be changed in place; written when the block ends well. One at a time;
        raises RunStateError when another call of this session takes too long.
        """
        with self._hold_lock():
            state = self._read_or_set_aside()
            original = state.model_copy(deep=True)
            yield state
            # what stands there already needs no second write, which could fail
            if state not in (original, self._parse()):
                self.write(state)

    def write(self, state: SessionState) -> None:
        """Replace the file; inside `change` only, for what must be kept even if the block is
        killed.
        """
        state.starts = state.starts[-MAX_KEPT_STARTS:]
        newest_run_ids = sorted(state.checks, key=lambda run_id: state.checks[run_id].at)[
            -MAX_KEPT_REPORTS:
        ]
        state.checks = {run_id: state.checks[run_id] for run_id in newest_run_ids}
        write_private(self.file, state.model_dump_json(indent=2))

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        with storage_errors(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = open(self.file.with_name(f".{self.name}.lock"), "w")  # noqa: SIM115 - closed below
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        with lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise RunStateError(
                            f"another call of session {self.name} has not ended after {LOCK_TIMEOUT_S:.0f} s; try again"
                        ) from None
                    time.sleep(0.02)
            yield
