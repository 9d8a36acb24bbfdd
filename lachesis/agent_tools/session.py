"""Keep the state of each agent's session on disk: its draft, starts, previews and last reports.

Whoever connects the agent names its session. Agents with different names do not affect each other;
an agent that is killed and comes back under its name continues where it was. The file is::

    sessions/{name}.json
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lachesis.base import paths
from lachesis.base.errors import ConfigError, RunStateError, StorageError
from lachesis.base.files import hold_file_lock, storage_errors, write_private
from lachesis.config.launch_spec import LaunchSpec, TestSpec
from lachesis.runs.store import RunStore

# Seconds that a call waits for a result, and for an environment's schema; clients give up on a call
# after 30 to 60 seconds.
MAX_WAIT_S, SCHEMA_TIMEOUT_S = 25.0, 25.0
# Seconds between two reports of progress while a call waits.
PROGRESS_INTERVAL_S = 2.0
# Receives the seconds waited, the maximum wait in seconds, and a text. The first number grows with
# each call, as MCP requires.
ReportProgress = Callable[[float, float, str], None]
SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
MAX_KEPT_STARTS = 1000
MAX_KEPT_REPORTS = 200
MAX_KEPT_PREVIEWS = 20
# Reading and writing the state takes milliseconds; a start with its checks up to a minute.
LOCK_TIMEOUT_S, WORK_TIMEOUT_S = 5.0, 60.0


def make_session_name(folder: Path | None = None) -> str:
    """Return the name of an agent's session: by default that of its working folder."""
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
    previews: list[str] = []
    """Fingerprints of the previews that were shown and not agreed to yet, the newest last."""
    last_reports: dict[str, LastReport] = {}
    test: RequestedTest | None = None


class SessionFile:
    """The state file of one session. `change` is atomic, also between processes.

    No call of a session holds its lock while it works, so that calls do not wait for each other.
    """

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
        """Return the state of the session; a damaged file is moved aside and named in the error."""
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
            RunStateError: The lock is not free after some seconds.
        """
        with self._hold_lock():
            state = self._read_or_set_aside()
            original = state.model_copy(deep=True)
            yield state
            # an unchanged state is not written again, because a write can fail
            if state != original:
                self.write(state)

    def write(self, state: SessionState) -> None:
        """Replace the file inside `change`, for what must be kept even if the process is killed."""
        state.starts = state.starts[-MAX_KEPT_STARTS:]
        state.previews = state.previews[-MAX_KEPT_PREVIEWS:]
        reports = state.last_reports
        newest_run_ids = sorted(reports, key=lambda run_id: reports[run_id].reported_at)
        state.last_reports = {
            run_id: reports[run_id] for run_id in newest_run_ids[-MAX_KEPT_REPORTS:]
        }
        write_private(self.file, state.model_dump_json(indent=2))

    @contextlib.contextmanager
    def hold(self, work: str) -> Iterator[None]:
        """Let only one call at a time do this work; calls that do other work do not wait.

        Raises:
            RunStateError: Another call does the same work for too long.
        """
        with self._hold_lock(f".{work}", WORK_TIMEOUT_S):
            yield

    @contextlib.contextmanager
    def _hold_lock(self, suffix: str = "", timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Hold a lock of the session; raise RunStateError after `timeout_s` seconds."""
        with storage_errors(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        timeout_error = RunStateError(
            f"another call of session {self.name} has not ended after {timeout_s:.0f} s; try again"
        )
        lock_file = self.file.with_name(f".{self.name}{suffix}.lock")
        with hold_file_lock(lock_file, timeout_s=timeout_s, timeout_error=timeout_error):
            yield


class AgentSession:
    """Name a session and the runs of its home.

    Raises:
        ConfigError: The name cannot be used as a file name.
    """

    def __init__(self, name: str, store: RunStore | None = None) -> None:
        self.store = store or RunStore()
        self.session_file = SessionFile(name, self.store.home)

    def require_draft(self) -> LaunchSpec:
        """Return the session's draft of a launch, which an agent has selected before.

        Raises:
            RunStateError: No environment is selected.
        """
        draft = self.session_file.read().draft
        if draft is None:
            raise RunStateError(
                f"no environment is selected in session {self.session_file.name}: call "
                "rl_select_environment(name) first; rl_list_environments() shows the names"
            )
        return draft
