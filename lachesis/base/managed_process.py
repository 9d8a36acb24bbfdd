"""Start a process of ours, watch it, restart it and end it; prove that a stored process is ours.

All programs that this project starts are `ManagedProcess`es, except the services of a run, which
its reaper starts (`lachesis/supervision/reaper.py`). Each leads a session of its own, so that its
children are ended with it, and writes to a log.

A process id alone proves nothing: the system gives the id of an ended process to another one. What
is kept on disk is therefore a `ProcessIdentity`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Self

from lachesis.base.errors import ProcessExitedError, StorageError
from lachesis.base.files import open_owner_only, read_last_lines, storage_errors

# A child that ends with its parent finds the number of a pipe's reading end in this variable.
PARENT_PIPE_VARIABLE = "LACHESIS_PARENT_PIPE"
# Pauses before a process that has died is started again; the last one is repeated.
RESTART_PAUSES_S = (1.0, 5.0, 15.0, 60.0)
# A process that has run this long begins with the first pause again.
RESTART_RESET_S = 600.0
POLL_S = 0.05
# The limits of `run_bounded`: more output ends the child, and only its end is returned.
MAX_OUTPUT_BYTES = 10_000_000
OUTPUT_TAIL_BYTES = 65_536


@dataclass(frozen=True)
class ProcessIdentity:
    """Name a process so that no later process with the same id is taken for it."""

    pid: int
    started_at: str
    """The boot and the clock ticks from it to the start; without /proc seconds since 1970."""

    @classmethod
    def read(cls, pid: int) -> Self | None:
        """Return the identity of a process, or None if it has ended, also if only as a zombie."""
        try:
            # The name of the program, in parentheses, may hold blanks and parentheses.
            fields = (
                Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            )
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return None if fields[0] == "Z" else cls(pid, f"{boot_id}:{fields[19]}")
        except FileNotFoundError:
            return None if Path("/proc/self").exists() else cls._read_without_proc(pid)
        except (OSError, IndexError):
            return None

    @classmethod
    def _read_without_proc(cls, pid: int) -> Self | None:
        """Return the creation time of a living process as its identity, or None."""
        import psutil  # `status` and `--help` do not need it

        try:
            process = psutil.Process(pid)
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            return None if is_zombie else cls(pid, f"{process.create_time():.2f}")
        except psutil.Error:
            return None

    @classmethod
    def from_json(cls, content: object) -> Self | None:
        """Return the identity that `asdict` wrote, or None for any other value."""
        match content:
            case {"pid": int(pid), "started_at": str(started_at)}:
                return cls(pid, started_at)
        return None

    def is_alive(self) -> bool:
        """Return whether this process, and no later one with its id, is running."""
        return type(self).read(self.pid) == self

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to the process, or do nothing if it has ended."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)


class ManagedProcess:
    """A process of ours, which leads a session of its own and writes to a log.

    Args:
        name: What messages call it.
        command: The program and its arguments.
        log: The file that gets its output; the output of the process before is kept beside it.
        env: All environment variables of the process; by default those of this process.
        cwd: Its working folder; by default that of this process.
        pass_fds: Open files that it inherits.
        stdin: Its standard input; by default empty.
        ends_with_parent: Whether it ends when this process ends, however that happens. Its program
            calls `end_with_parent`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: tuple[int, ...] = (),
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        ends_with_parent: bool = False,
    ) -> None:
        self.name, self.command, self.log, self.env = name, list(command), log, env
        self.cwd, self.pass_fds, self.stdin = cwd, pass_fds, stdin
        self.ends_with_parent = ends_with_parent
        self.process: subprocess.Popen[bytes] | None = None
        self._parent_pipe: int | None = None
        self._started_at = self._died_at = 0.0
        self._num_deaths = 0

    @property
    def pid(self) -> int:
        """Return the process id of the process that was started last."""
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return None if self.process is None else self.process.poll()

    @property
    def is_running(self) -> bool:
        """Return whether the process was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process.

        Raises:
            StorageError: Its log cannot be written, or its program cannot be started.
        """
        self._close_parent_pipe()
        env, pipe_end = dict(os.environ if self.env is None else self.env), None
        if self.ends_with_parent:
            pipe_end, self._parent_pipe = os.pipe()
            env[PARENT_PIPE_VARIABLE] = str(pipe_end)
        try:
            with storage_errors(self.log):
                if self.log.exists():  # It says why an earlier process has ended.
                    os.replace(self.log, self.log.with_name(f"{self.log.name}.1"))
                with open(self.log, "ab", opener=open_owner_only) as stream:
                    self.process = subprocess.Popen(
                        self.command,
                        cwd=self.cwd,
                        env=env,
                        pass_fds=(*self.pass_fds, *(() if pipe_end is None else (pipe_end,))),
                        stdin=self.stdin,
                        stdout=stream,
                        stderr=stream,
                        start_new_session=True,
                    )
        finally:
            if pipe_end is not None:
                os.close(pipe_end)
        self._started_at, self._died_at = time.monotonic(), 0.0

    def leave_running(self) -> None:
        """Let the process outlive its parent; if it ends before its parent, it leaves no zombie."""
        assert self.process is not None
        threading.Thread(target=self.process.wait, name=self.name, daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code, or None if the process still runs after `timeout_s` seconds."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def require_running(self) -> None:
        """Raise ProcessExitedError if the process has ended."""
        if not self.is_running:
            raise ProcessExitedError(self.describe_end())

    def wait_until_ready(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `is_ready` returns true.

        Raises:
            ProcessExitedError: The process has ended, or is not ready after `timeout_s` seconds.
        """
        until = time.monotonic() + timeout_s
        while not is_ready():
            self.require_running()
            if time.monotonic() > until:
                raise ProcessExitedError(
                    f"the {self.name} is not ready after {timeout_s:.0f} s, see {self.log}"
                )
            time.sleep(POLL_S)

    def wait_within_limits(
        self, timeout_s: float, max_log_bytes: int
    ) -> Literal["exit", "time", "output"]:
        """Wait until the process ends, takes too long or prints too much; return which.

        Grandchildren that hold the log open are not waited for.
        """
        until = time.monotonic() + timeout_s
        while self.wait(POLL_S) is None:
            if self.log.stat().st_size > max_log_bytes:
                return "output"
            if time.monotonic() > until:
                return "time"
        return "output" if self.log.stat().st_size > max_log_bytes else "exit"

    def restart_if_dead(self) -> bool:
        """Start the process again if it has died and its pause is over; return whether it was.

        Call it again and again: each call takes a moment only. A process that dies at once each
        time is started again every minute. What cannot be started now is tried again later.
        """
        now = time.monotonic()
        if self.is_running:
            return False
        if not self._died_at:
            self._died_at = now
            if now - self._started_at > RESTART_RESET_S:
                self._num_deaths = 0
            pause_s = self._get_pause_s()
            print(
                f"restarting in {pause_s:g} s: {self.describe_end().splitlines()[0]}",
                file=sys.stderr,
                flush=True,
            )
        if now - self._died_at < self._get_pause_s():
            return False
        self._num_deaths += 1
        try:
            self.start()
        except StorageError:
            self._died_at = now
            return False
        return True

    def _get_pause_s(self) -> float:
        return RESTART_PAUSES_S[min(self._num_deaths, len(RESTART_PAUSES_S) - 1)]

    def describe_end(self) -> str:
        """Return that the process has ended, with its exit code and the end of its log."""
        return (
            f"the {self.name} exited with code {self.exit_code}, see {self.log}; its last lines:\n"
            f"{read_last_lines(self.log)}"
        )

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to the process and its children, or do nothing if it has ended."""
        if self.process is not None:
            signal_group(self.pid, signal_number)

    def end(self, grace_s: float = 10.0) -> None:
        """Send SIGTERM to the process and its children, and SIGKILL after `grace_s` seconds."""
        self.send_signal(signal.SIGTERM)
        if self.process is not None and self.wait(grace_s) is None:
            self.kill()
        self._close_parent_pipe()

    def kill(self) -> None:
        """Kill the process and its children, also those that have outlived it, at once."""
        self.send_signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        self._close_parent_pipe()

    def _close_parent_pipe(self) -> None:
        if self._parent_pipe is not None:
            os.close(self._parent_pipe)
            self._parent_pipe = None


def signal_group(leader_pid: int, signal_number: int) -> None:
    """Send a signal to the group of this leader, or do nothing if the group has ended."""
    # macOS returns EPERM for a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader_pid, signal_number)


def end_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Signal the group of this process as soon as the process that started it ends.

    A program calls it first. It does nothing in a process that may outlive its parent.
    """
    pipe = os.environ.pop(PARENT_PIPE_VARIABLE, None)
    if pipe is None:
        return

    def watch() -> None:
        while os.read(int(pipe), 4096):
            pass
        os.killpg(os.getpgrp(), signal_number)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@dataclass(frozen=True)
class BoundedResult:
    """Describe how a process ended that had limits."""

    end_reason: Literal["exit", "time", "output"]
    """`exit` for a process that ended by itself, else the limit for which it was killed."""
    exit_code: int
    output: str
    """The end of the output, at most `OUTPUT_TAIL_BYTES` bytes of it."""

    def last_lines(self, count: int, max_length: int = 500) -> str:
        """Return the last `count` lines of the output, each cut to `max_length` characters."""
        return "\n".join(line[:max_length] for line in self.output.splitlines()[-count:])


def run_bounded(
    command: Sequence[str], *, input_bytes: bytes, env: dict[str, str], timeout_s: float
) -> BoundedResult:
    """Run a command to its end and return its result; kill it and its children when it takes too
    long.

    Code that this project does not trust, such as an environment file, runs in such a child.

    Args:
        command: The program, which calls `end_with_parent`, and its arguments.
        input_bytes: The whole standard input of the child.
        env: All environment variables of the child.
        timeout_s: The child is killed after this many seconds, or once it has printed more than
            `MAX_OUTPUT_BYTES`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="lachesis-") as folder,
        tempfile.TemporaryFile() as stdin,
    ):
        stdin.write(input_bytes)
        stdin.seek(0)
        child = ManagedProcess(
            "child", command, Path(folder) / "output", env=env, stdin=stdin, ends_with_parent=True
        )
        child.start()
        try:
            end_reason = child.wait_within_limits(timeout_s, MAX_OUTPUT_BYTES)
        finally:
            child.kill()  # No grandchild survives, also after Ctrl-C.
        exit_code = child.exit_code
        assert exit_code is not None
        with child.log.open("rb") as file:
            file.seek(max(0, child.log.stat().st_size - OUTPUT_TAIL_BYTES))
            output = file.read(OUTPUT_TAIL_BYTES).decode(errors="replace")
    return BoundedResult(end_reason, exit_code, output)
