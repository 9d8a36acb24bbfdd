"""Run a child of foreign code to its end, within limits of time and of output."""

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

MAX_OUTPUT_BYTES = 10_000_000
OUTPUT_TAIL_BYTES = 65_536
POLL_S = 0.1


@dataclass(frozen=True)
class ChildResult:
    """How a child ended. `end` is `time` or `output` when it was killed for exceeding that limit."""

    end_reason: Literal["exit", "time", "output"]
    exit_code: int
    output: str
    """The end of what it printed, at most `KEPT_BYTES` of it."""

    def last_lines(self, count: int, max_length: int = 500) -> str:
        """Return the last lines of the output, each of bounded length."""
        return "\n".join(line[:max_length] for line in self.output.splitlines()[-count:])


def run_bounded(
    command: Sequence[str], *, input_bytes: bytes, env: dict[str, str], timeout_s: float
) -> ChildResult:
    """Run a command that reads `request` from its standard input, and end it with all that it has
    started.

    Args:
        command: The program and its arguments.
        request: The whole standard input; further reads meet its end.
        env: All variables of the child.
        timeout_s: The child is killed after this time, or once it has printed more than
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
    finally:  # also at Ctrl-C, and for what the child has started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    return ChildResult(end_reason, child.returncode, output.decode(errors="replace"))


def _read_output(
    child: subprocess.Popen[bytes], deadline: float
) -> tuple[Literal["exit", "time", "output"], bytes]:
    """Read until the child has ended or exceeds a limit. A grandchild that holds the pipe open is
    not waited for.
    """
    assert child.stdout is not None
    pipe_fd, output_tail, num_bytes = child.stdout.fileno(), b"", 0
    while True:
        # before the read, which then gets all that it has printed
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
        if ready and not chunk:  # it has closed its output and goes on
            time.sleep(POLL_S)
