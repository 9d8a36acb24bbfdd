"""Programs that nobody has read, run where they can do no harm: no network, no other process,
nothing written, little read, and limits on memory, time and output. See `lachesis.environment.jail`
for how.

Linux 5.13 or newer, on x86_64 or aarch64, without privileges; elsewhere nothing is run.
"""

from __future__ import annotations

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
from typing import Literal

from lachesis.environment import jail, timeouts
from lachesis.environment.outcome import Invalid

JAIL_FILE = Path(jail.__file__)
MEBIBYTE = 2**20
MAX_START_S = 20.0
"""A machine under load may take that long to begin; it is not the program's time."""
KILLED_MESSAGE = "something on this machine has killed the program"
MAX_CPU_WAIT_FACTOR = 10.0
"""A program that waits for a processor may take so many times its limit."""
Ending = Literal["ended", "timed out", "out of memory", "too much output", "failed"]


@dataclass(frozen=True)
class Limits:
    """`seconds` count from the beginning of the program, without what it waits for a processor; it
    may use as many of processor time.
    """

    seconds: float = 5.0
    memory_mib: int = 512
    output_bytes: int = 64 * 1024


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended, and what it said. `code` is its exit code, or minus the signal that
    ended it.
    """

    how: Ending
    code: int
    output: str
    errors: str
    seconds: float


class Sandbox:
    """Runs at most `at_once` programs at a time; the others wait their turn."""

    def __init__(self, limits: Limits | None = None, max_concurrent: int | None = None) -> None:
        self.limits = limits or Limits()
        self._semaphore = asyncio.Semaphore(
            max_concurrent
            or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        )

    async def run(self, program: str, stdin: str = "") -> SandboxResult:
        """Run a Python program to its end, whatever it does. Raises Invalid when this machine
        cannot confine or start one, which is not the program's fault.
        """
        with timeouts.pause_timeout():
            await self._semaphore.acquire()
        try:
            with tempfile.TemporaryDirectory(prefix="lachesis-jail-") as folder:
                return await self._run_child(program, stdin, folder)
        finally:
            self._semaphore.release()

    async def _run_child(self, program: str, stdin: str, folder: str) -> SandboxResult:
        limits = self.limits
        request = {
            "program": program,
            "stdin": stdin,
            "cpu_s": limits.seconds,
            "memory": limits.memory_mib * MEBIBYTE,
        }
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-B", str(JAIL_FILE), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
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
                    pass  # asyncio takes a child for ended only when all it has said was read
            await child.wait()


async def _start_program(child: asyncio.subprocess.Process, request: bytes) -> None:
    """Hand over the program, and wait until it begins. Raises Invalid when it does not."""
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None  # noqa: PT018
    with contextlib.suppress(ConnectionError):
        child.stdin.write(request)
        child.stdin.close()
    try:
        async with asyncio.timeout(MAX_START_S):
            if await child.stdout.read(1) == jail.STARTED:
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
    assert child.stdout is not None and child.stderr is not None  # noqa: PT018
    started = time.monotonic()
    readers = [
        asyncio.ensure_future(_read_limited(stream, limits.output_bytes))
        for stream in (child.stdout, child.stderr)
    ]
    finished = asyncio.gather(*readers, child.wait())
    end_reason: Ending = "ended"
    try:
        while (
            remaining_s := limits.seconds
            + _read_cpu_wait_s(child.pid)
            - (time.monotonic() - started)
        ) > 0 and not finished.done():
            await asyncio.wait({finished}, timeout=remaining_s)
            if time.monotonic() - started > MAX_CPU_WAIT_FACTOR * limits.seconds:
                raise Invalid("this machine had no time for the program")
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
    await asyncio.gather(*readers, return_exceptions=True)  # nobody else may read when this is over
    duration_s = time.monotonic() - started
    if end_reason == "ended" and code == -signal.SIGKILL and duration_s < limits.seconds:
        raise Invalid(KILLED_MESSAGE)  # it cannot have used up its processor time
    if end_reason == "ended" and code != 0:
        end_reason = _classify_exit(code or 0, texts[1])
    return SandboxResult(
        end_reason, code if code is not None else -signal.SIGKILL, texts[0], texts[1], duration_s
    )


def _read_cpu_wait_s(pid: int) -> float:
    """Seconds for which the program could have run and no processor was free; 0 where the kernel
    does not say. Source: the second number of /proc/PID/schedstat, in nanoseconds
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
    return "out of memory" if errors.rstrip().endswith("MemoryError") else "failed"
