"""Run untrusted programs where they can do no harm.

A program has no network, no other process, nothing to write, little to read, and limits on memory,
time and output; `lachesis.environment_toolkit.sandbox_child` describes how. It needs Linux 5.13 or
newer on x86_64 or aarch64, and no privileges; elsewhere nothing is run.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lachesis.environment_toolkit import sandbox_child, scoring
from lachesis.environment_toolkit.rollout import Invalid

CHILD_FILE = Path(sandbox_child.__file__)
MEBIBYTE = 2**20
# How long a loaded machine may take to start a program; this is not part of the program's time.
MAX_START_S = 20.0
KILLED_MESSAGE = "another process of this machine killed the program"
# A program that waits for a free processor may take this many times its time limit.
MAX_CPU_WAIT_FACTOR = 10.0
Ending = Literal["ended", "timed out", "out of memory", "too much output", "failed"]


@dataclass(frozen=True)
class Limits:
    """Limit one program.

    `seconds` is both the maximum processor time and the maximum time since the start of the
    program, not counting waits for a free processor.
    """

    seconds: float = 5.0
    memory_mib: int = 512
    output_bytes: int = 64 * 1024


@dataclass(frozen=True)
class SandboxResult:
    """Hold the exit code of a program and its output.

    `code` is its exit code, or minus the number of the signal that ended it.
    """

    how: Ending
    code: int
    output: str
    errors: str
    seconds: float


class Sandbox:
    """Run at most `max_concurrent` programs at a time; others wait for their turn."""

    def __init__(self, limits: Limits | None = None, max_concurrent: int | None = None) -> None:
        self.limits = limits or Limits()
        self._semaphore = asyncio.Semaphore(
            max_concurrent
            or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        )

    async def run(self, program: str, stdin: str = "") -> SandboxResult:
        """Run a Python program to its end.

        Raises:
            Invalid: This machine cannot confine or start a program, which is not the program's
                fault.
        """
        with scoring.pause_timeout():
            await self._semaphore.acquire()
        try:
            with tempfile.TemporaryDirectory(prefix="lachesis-jail-") as folder:
                return await self._run_child(program, stdin, folder)
        finally:
            self._semaphore.release()

    async def _run_child(self, program: str, stdin: str, folder: str) -> SandboxResult:
        """Start the child, run the program in it, and return the result."""
        limits = self.limits
        request = {
            "program": program,
            "stdin": stdin,
            "cpu_s": limits.seconds,
            "memory": limits.memory_mib * MEBIBYTE,
        }
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-B", str(CHILD_FILE), stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, cwd=folder, env={}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise Invalid(f"no child can be started: {error.strerror}") from error
        try:
            await _start_program(child, json.dumps(request).encode() + b"\n")
            return await _wait_for_end(child, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGKILL)
            for stream in (child.stdout, child.stderr):
                while stream is not None and await stream.read(MEBIBYTE):
                    pass  # asyncio regards a child as ended only after all its output was read.
            await child.wait()


async def _start_program(child: asyncio.subprocess.Process, request: bytes) -> None:
    """Send the program to the child, and wait until it starts.

    Raises:
        Invalid: It did not start.
    """
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None  # noqa: PT018
    with contextlib.suppress(ConnectionError):
        child.stdin.write(request)
        child.stdin.close()
    try:
        async with asyncio.timeout(MAX_START_S):
            if await child.stdout.read(1) == sandbox_child.STARTED:
                return
            problem = (
                (await child.stderr.read(2000)).decode(errors="replace").strip().splitlines()[-1:]
            )
            code = await child.wait()
    except TimeoutError:
        raise Invalid(f"a child did not start in {MAX_START_S:.0f} s") from None
    if code == -signal.SIGKILL:
        raise Invalid(KILLED_MESSAGE)
    raise Invalid(f"this machine cannot confine a program: {' '.join(problem)[:120]}")


async def _wait_for_end(child: asyncio.subprocess.Process, limits: Limits) -> SandboxResult:
    """Return how a program ended and its output, within its limits of time and output."""
    assert child.stdout is not None and child.stderr is not None  # noqa: PT018
    started = time.monotonic()
    readers = [
        asyncio.ensure_future(_read_limited(stream, limits.output_bytes))
        for stream in (child.stdout, child.stderr)
    ]
    finished = asyncio.gather(*readers, child.wait())
    end_reason: Ending = "ended"
    try:
        await _wait_within_limit(finished, child.pid, limits)
        if finished.done():
            finished.result()
        else:
            end_reason = "timed out"
    except _TooMuchOutput:
        end_reason = "too much output"
    finally:
        finished.cancel()
    code = child.returncode
    texts = [
        reader.result().decode(errors="replace") if _has_ended(reader) else "" for reader in readers
    ]
    for reader in readers:
        reader.cancel()
    # The caller reads the rest of the streams, so no reader may be left.
    await asyncio.gather(*readers, return_exceptions=True)
    duration_s = time.monotonic() - started
    if end_reason == "ended" and code == -signal.SIGKILL and duration_s < limits.seconds:
        raise Invalid(KILLED_MESSAGE)  # It cannot have used up its processor time yet.
    if end_reason == "ended" and code != 0:
        end_reason = _classify_exit(code or 0, texts[1])
    return SandboxResult(
        end_reason, code if code is not None else -signal.SIGKILL, texts[0], texts[1], duration_s
    )


async def _wait_within_limit(finished: asyncio.Future[Any], pid: int, limits: Limits) -> None:
    """Wait for the end of a program; the time in which it had no processor does not count."""
    started = time.monotonic()
    while not finished.done():
        elapsed_s = time.monotonic() - started
        remaining_s = limits.seconds + _read_cpu_wait_s(pid) - elapsed_s
        if remaining_s <= 0:
            return
        await asyncio.wait({finished}, timeout=remaining_s)
        if time.monotonic() - started > MAX_CPU_WAIT_FACTOR * limits.seconds:
            raise Invalid("this machine had no time for the program")


def _read_cpu_wait_s(pid: int) -> float:
    """Return for how many seconds a process waited for a free processor, or 0 if that is unknown.

    Source: the second number of /proc/PID/schedstat, in nanoseconds
    (Documentation/scheduler/sched-stats.rst of Linux).
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class _TooMuchOutput(Exception):
    pass


async def _read_limited(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    content = bytearray()
    while chunk := await stream.read(16 * 1024):
        content += chunk
        if len(content) > max_bytes:
            raise _TooMuchOutput
    return bytes(content)


def _has_ended(task: asyncio.Future[bytes]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _classify_exit(code: int, errors: str) -> Ending:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timed out"
    if errors.rstrip().endswith("MemoryError"):
        return "out of memory"
    return "failed"
