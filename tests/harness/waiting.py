"""Wait in a test: a success costs no time, and a slow machine beside other work needs more."""

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SLOW = 3
LONG_S = 20
"""Shorter waits say how soon something has to happen."""
POLL_S = 0.01
"""How often a test's HTTP server looks whether it shall end; the library's half a second is paid in
every teardown.
"""


def deadline(timeout_s: float) -> float:
    """When to give up, on the monotonic clock."""
    return time.monotonic() + (timeout_s * SLOW if timeout_s >= LONG_S else timeout_s)


def wait_until(
    condition: Callable[[], T],
    timeout_s: float,
    what: object = "what the test waits for",
    *,
    poll_s: float = 0.1,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
) -> T:
    """Return the first value of the condition that is true.

    Args:
        condition: What is asked again and again.
        timeout_s: The seconds after which the test fails.
        what: What has not happened then: a text, or a function that returns one.
        poll_s: The seconds between two questions.
        process: A process whose end fails the test at once.
        log: The file whose end a failure shows.
    """
    until = deadline(timeout_s)
    while not (value := condition()):
        shown = log.read_text()[-3000:] if log is not None and log.exists() else ""
        if process is not None:
            assert process.poll() is None, f"the process ended ({process.returncode}): {shown}"
        if time.monotonic() > until:
            missing = what() if callable(what) else what
            raise AssertionError(f"{missing} has not happened in {timeout_s:g} s {shown}")
        time.sleep(poll_s)
    return value


def call_again(
    call: Callable[[], T], error: type[Exception], timeout_s: float = 60, **options: Any
) -> T:
    """Return what a call returns as soon as it does not raise this error any more.

    Args:
        call: What is called again and again.
        error: The error that means "not yet".
        timeout_s: The seconds after which the test fails.
        **options: Further arguments of `wait_until`.
    """

    def answer() -> tuple[T] | None:
        with contextlib.suppress(error):
            return (call(),)
        return None

    wrapped_answer = wait_until(answer, timeout_s, "an answer", **options)
    assert wrapped_answer
    return wrapped_answer[0]
