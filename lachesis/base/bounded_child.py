"""Run a child process with limits on its time and on its output.

Code that this project does not trust, such as an environment file, runs in such a child.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# The child is killed after it has printed more than this.
MAX_OUTPUT_BYTES = 10_000_000
# Only the last part of the output is kept.
OUTPUT_TAIL_BYTES = 65_536
POLL_S = 0.1


@dataclass(frozen=True)
class ChildResult:
    """Describe how a child process ended."""

    end_reason: Literal["exit", "time", "output"]
    """`exit` for a child that ended by itself, else the limit for which it was killed."""
    exit_code: int
    output: str
    """The end of the output, at most `OUTPUT_TAIL_BYTES` bytes of it."""

    def last_lines(self, count: int, max_length: int = 500) -> str:
        """Return the last `count` lines of the output, each cut to `max_length` characters."""
        return "\n".join(line[:max_length] for line in self.output.splitlines()[-count:])


def run_bounded(
    command: Sequence[str], *, input_bytes: bytes, env: dict[str, str], timeout_s: float
) -> ChildResult:
    """Run a command to its end and return its result; kill it and its children when it takes too
    long.

    Args:
        command: The program and its arguments.
        input_bytes: The whole standard input of the child.
        env: All environment variables of the child.
        timeout_s: The child is killed after this many seconds, or once it has printed more than
            `MAX_OUTPUT_BYTES`.
    """
    with tempfile.TemporaryFile() as stdin:
        stdin.write(input_bytes)
        stdin.seek(0)
        child = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    try:
        end_reason, output = _read_output(child, time.monotonic() + timeout_s)
    finally:
        # The whole process group is killed, also after Ctrl-C, so that no grandchild survives.
        signal_group(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    return ChildResult(end_reason, child.returncode, output.decode(errors="replace"))


def _read_output(
    child: subprocess.Popen[bytes], deadline: float
) -> tuple[Literal["exit", "time", "output"], bytes]:
    """Read the output until the child ends or exceeds a limit.

    A grandchild may hold the pipe open after the child has ended; it is not waited for.
    """
    assert child.stdout is not None
    pipe_fd, output_tail, num_bytes = child.stdout.fileno(), b"", 0
    while True:
        # Ask before reading: if the child has ended, the read returns the rest of its output.
        has_ended = child.poll() is not None
        ready, _, _ = select.select([pipe_fd], [], [], 0 if has_ended else POLL_S)
        chunk = os.read(pipe_fd, OUTPUT_TAIL_BYTES) if ready else b""
        output_tail, num_bytes = (output_tail + chunk)[-OUTPUT_TAIL_BYTES:], num_bytes + len(chunk)
        if num_bytes > MAX_OUTPUT_BYTES:
            return "output", output_tail
        if has_ended and not chunk:
            return "exit", output_tail
        if time.monotonic() > deadline:
            return "time", output_tail
        if ready and not chunk:  # The child has closed its output but still runs.
            time.sleep(POLL_S)


def signal_group(leader_pid: int, signal_number: int) -> None:
    """Send a signal to the group of this leader, or do nothing if the group has ended."""
    # macOS returns EPERM for a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader_pid, signal_number)
