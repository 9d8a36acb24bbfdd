"""The services of a run as one context: leaving it ends them in reverse order, also when this
process is killed.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from lachesis.base.errors import ProcessExitedError, list_error_codes
from lachesis.base.files import read_last_lines
from lachesis.base.secrets import build_child_env, find_secret_values
from lachesis.supervision.process import ServiceSpec

MAX_SERVICE_LOG_BYTES = 200_000_000
"""Of a service's log and the part before it; an environment may print without end."""
REAPER = Path(__file__).with_name("reaper.py")
T = TypeVar("T")


@dataclass
class _ServiceState:
    spec: ServiceSpec
    pid: int | None = None
    exit_code: int | None = None
    has_ended: bool = False
    error: str | None = None


class ServiceGroup:
    """Talks to the reaper, which is the parent of every service and holds the file descriptors in
    `hold` as long as one of them lives; `own` is put into its environment. While the file `hurry`
    is there, what shall end is killed at once.
    """

    def __init__(
        self,
        inherited_fds: tuple[int, ...] = (),
        stop_now_file: Path | None = None,
        reaper_env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._inherited_fds, self._stop_now_file, self._reaper_env = (
            inherited_fds,
            stop_now_file,
            reaper_env,
        )

    def __enter__(self) -> Self:
        self._reaper = subprocess.Popen(
            [
                sys.executable,
                "-S",
                str(REAPER),
                *([str(self._stop_now_file)] if self._stop_now_file else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the runner would take an inherited one for the flow itself
            pass_fds=self._inherited_fds,
            env=build_child_env(dict(self._reaper_env)),
            start_new_session=True,
        )
        self._states: dict[str, _ServiceState] = {}
        self._reported_exits: set[str] = set()
        self._state_changed = threading.Condition()
        self._is_closing = self._is_reaper_lost = False
        self._reader_thread = threading.Thread(
            target=self._read_reaper_messages, name="reaper", daemon=True
        )
        self._reader_thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self, spec: ServiceSpec) -> int:
        """Start a service and return its process id. Raises ProcessExitedError when it cannot be
        started.
        """
        with self._state_changed:
            self._states[spec.name] = _ServiceState(spec)
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        self._send_to_reaper(
            name=spec.name,
            argv=spec.argv,
            env=build_child_env(spec.env),
            cwd=str(spec.cwd),
            log=str(spec.log),
            grace_s=spec.grace_s,
            secrets=find_secret_values({**os.environ, **spec.env}),
            log_bytes=MAX_SERVICE_LOG_BYTES,
        )
        with self._state_changed:
            state = self._states[spec.name]
            self._state_changed.wait_for(
                lambda: state.pid is not None or state.error is not None, timeout=30
            )
        if state.pid is None:
            state.has_ended = True
            raise ProcessExitedError(
                f"{spec.name} could not be started: {state.error or 'the reaper does not answer'}"
            )
        return state.pid

    def stop(self, name: str) -> int | None:
        """End one service now and return its exit code (negative: the signal that ended it)."""
        self._send_to_reaper(stop=name)
        return self.wait(name, timeout_s=self._states[name].spec.grace_s + 10)

    def wait(self, name: str, timeout_s: float) -> int | None:
        """The exit code, or None when the service still runs after `timeout_s` seconds."""
        with self._state_changed:
            self._state_changed.wait_for(lambda: self._states[name].has_ended, timeout=timeout_s)
            return self._states[name].exit_code

    def is_running(self, name: str) -> bool:
        state = self._states.get(name)
        return state is not None and not state.has_ended

    def has_service(self, name: str) -> bool:
        """Whether it was started and not forgotten."""
        return name in self._states

    def forget_service(self, name: str) -> None:
        """It has ended, and that is no news any more."""
        with self._state_changed:
            del self._states[name]

    def get_exit_code(self, name: str) -> int | None:
        """None while it runs."""
        return self._states[name].exit_code if self._states[name].has_ended else None

    def collect_exit_codes(self) -> dict[str, int | None]:
        """The services that have ended, with their exit codes."""
        self._reported_exits = self._find_ended_services()
        return {name: self._states[name].exit_code for name in self._reported_exits}

    def call_unless_service_dies(self, function: Callable[[], T], default: T) -> T:
        """What `question` returns or raises, or `otherwise` as soon as there is a death that
        `exited` has not told: an answer that does not come must not hide it. The question then ends
        by itself, unheard.
        """
        future: Future[T] = Future()
        future.add_done_callback(lambda _: self._notify())
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(_resolve_future, future, function), daemon=True
        ).start()
        with self._state_changed:
            self._state_changed.wait_for(
                lambda: (
                    future.done()
                    or self._is_reaper_lost
                    or bool(self._find_ended_services() - self._reported_exits)
                )
            )
        return future.result() if future.done() else default

    def _find_ended_services(self) -> set[str]:
        return {name for name, state in self._states.items() if state.has_ended}

    def _notify(self) -> None:
        with self._state_changed:
            self._state_changed.notify_all()

    def require_reaper(self) -> None:
        """Raises ProcessExitedError when the reaper has died, and with it the services."""
        if self._is_reaper_lost:
            raise ProcessExitedError(
                f"the reaper (pid {self._reaper.pid}) was killed, and the services with it"
            )

    def require_running(self, name: str) -> None:
        """Raises ProcessExitedError, with the exit code and the end of the log, when the service is
        dead.
        """
        self.require_reaper()
        state = self._states[name]
        if state.has_ended:
            raise make_exit_error(state.spec, state.exit_code)

    def close(self) -> None:
        """End all services, the last one started first, and wait until they are gone."""
        self._is_closing = True
        if self._reaper.stdin and not self._reaper.stdin.closed:
            with contextlib.suppress(OSError):
                self._reaper.stdin.close()
        self._reaper.wait()
        self._reader_thread.join(timeout=5)
        if self._reaper.stdout and not self._reader_thread.is_alive():
            self._reaper.stdout.close()

    def _send_to_reaper(self, **message: Any) -> None:
        assert self._reaper.stdin is not None
        try:
            self._reaper.stdin.write(json.dumps(message).encode() + b"\n")
            self._reaper.stdin.flush()
        except OSError as error:
            raise ProcessExitedError(
                f"the reaper (pid {self._reaper.pid}) is gone, and the services with it: {error}"
            ) from error

    def _read_reaper_messages(self) -> None:
        assert self._reaper.stdout is not None
        for line in self._reaper.stdout:
            message = json.loads(line)
            with self._state_changed:
                if "started" in message:
                    self._states[message["started"]].pid = message["pid"]
                elif "refused" in message:
                    self._states[message["refused"]].error = message["error"]
                elif "exited" in message:
                    state = self._states[message["exited"]]
                    state.exit_code, state.has_ended = message["code"], True
                self._state_changed.notify_all()
        with self._state_changed:  # the reaper's end is the end of every service
            self._is_reaper_lost = not self._is_closing
            for state in self._states.values():
                if self._is_reaper_lost and state.pid is not None and not state.has_ended:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        # the kernel ended the service, but not its own children
                        os.killpg(state.pid, signal.SIGKILL)
                state.has_ended = True
            self._state_changed.notify_all()


def _resolve_future(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def make_exit_error(spec: ServiceSpec, exit_code: int | None) -> ProcessExitedError:
    """The error that tells a dead service's exit code and what it said last; `details["service"]`
    names it.

    A process of ours ends its log with the code of its error and the cause, which is then all that
    is shown.
    """
    how = (
        f"was ended by signal {-exit_code}"
        if exit_code is not None and exit_code < 0
        else f"exited with code {exit_code}"
    )
    last_lines = read_last_lines(spec.log)
    cause = last_lines.rpartition("\n")[2]
    if cause.partition(": ")[0] in list_error_codes():
        return ProcessExitedError(f"{spec.name} {how}: {cause}, see {spec.log}", service=spec.name)
    log_excerpt = f"; its last lines:\n{last_lines}" if last_lines else "; it wrote nothing"
    return ProcessExitedError(f"{spec.name} {how}, see {spec.log}{log_excerpt}", service=spec.name)
