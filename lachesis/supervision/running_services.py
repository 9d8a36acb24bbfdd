"""Manage the services of a run as a context: leaving it ends them in reverse order.

They end even if this process is killed.
"""

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

from lachesis.base.errors import ProcessExitedError, RLEnvironmentError, list_error_codes, shorten
from lachesis.base.files import read_last_lines
from lachesis.base.secrets import build_child_env, find_secret_values
from lachesis.supervision.services.spec import ServiceSpec

# Maximum size of a service's log and its predecessor, because an environment may print endlessly.
MAX_SERVICE_LOG_BYTES = 200_000_000
MAX_LINES_AFTER_CAUSE = 5
MAX_LINE_CHARS = 500
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
    """Start and end services through the reaper, which is their parent process.

    The reaper keeps `inherited_fds` open as long as a service is alive, and has `reaper_env` in its
    environment. While `stop_now_file` exists, services are killed without time to end.
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
            stderr=subprocess.DEVNULL,  # The runner would wait for an inherited one.
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
        """Start a service and return its process id.

        Raises:
            ProcessExitedError: It cannot be started.
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
        """End a service and return its exit code, which is negative for a signal."""
        self._send_to_reaper(stop=name)
        return self.wait(name, timeout_s=self._states[name].spec.grace_s + 10)

    def wait(self, name: str, timeout_s: float) -> int | None:
        """Return the exit code, or None if the service still runs after `timeout_s` seconds."""
        with self._state_changed:
            self._state_changed.wait_for(lambda: self._states[name].has_ended, timeout=timeout_s)
            return self._states[name].exit_code

    def is_running(self, name: str) -> bool:
        """Return whether a service has started and not ended."""
        state = self._states.get(name)
        return state is not None and not state.has_ended

    def has_service(self, name: str) -> bool:
        """Return whether a service was started and not forgotten."""
        return name in self._states

    def forget_service(self, name: str) -> None:
        """Forget a service that has ended, so that its exit is no longer reported."""
        with self._state_changed:
            del self._states[name]

    def get_exit_code(self, name: str) -> int | None:
        """Return the exit code of a service, or None while it runs."""
        if self._states[name].has_ended:
            return self._states[name].exit_code
        return None

    def collect_exit_codes(self) -> dict[str, int | None]:
        """Return the exit codes of the services that have ended."""
        self._reported_exits = self._find_ended_services()
        return {name: self._states[name].exit_code for name in self._reported_exits}

    def call_unless_service_dies(self, function: Callable[[], T], default: T) -> T:
        """Return the function's result, or `default` as soon as a service dies unreported.

        A response that does not come must not hide the death of a service. The function then
        continues in its thread, and its result is dropped.
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
        if future.done():
            return future.result()
        return default

    def _find_ended_services(self) -> set[str]:
        return {name for name, state in self._states.items() if state.has_ended}

    def _notify(self) -> None:
        with self._state_changed:
            self._state_changed.notify_all()

    def require_reaper(self) -> None:
        """Raise ProcessExitedError if the reaper has died, and its services with it."""
        if self._is_reaper_lost:
            raise ProcessExitedError(
                f"the reaper (pid {self._reaper.pid}) was killed, and the services with it"
            )

    def require_running(self, name: str) -> None:
        """Raise ProcessExitedError with exit code and end of the log of an ended service."""
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

    def _send_to_reaper(self, **message: object) -> None:
        """Send a message to the reaper; raise ProcessExitedError if that is gone."""
        assert self._reaper.stdin is not None
        try:
            self._reaper.stdin.write(json.dumps(message).encode() + b"\n")
            self._reaper.stdin.flush()
        except OSError as error:
            raise ProcessExitedError(
                f"the reaper (pid {self._reaper.pid}) is gone, and the services with it: {error}"
            ) from error

    def _read_reaper_messages(self) -> None:
        """Apply the reaper's messages until it ends; a killed reaper ends its services."""
        assert self._reaper.stdout is not None
        for line in self._reaper.stdout:
            message = json.loads(line)
            with self._state_changed:
                self._apply_reaper_message(message)
                self._state_changed.notify_all()
        with self._state_changed:  # When the reaper ends, every service has ended.
            self._is_reaper_lost = not self._is_closing
            for state in self._states.values():
                if self._is_reaper_lost and state.pid is not None and not state.has_ended:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        # The kernel has killed the service, but not the service's children.
                        os.killpg(state.pid, signal.SIGKILL)
                state.has_ended = True
            self._state_changed.notify_all()

    def _apply_reaper_message(self, message: dict[str, Any]) -> None:
        """Store what the reaper reports of a service, unless the service was forgotten."""
        name = message.get("started") or message.get("refused") or message.get("exited")
        state = self._states.get(name or "")
        if state is None:
            return
        if "started" in message:
            state.pid = message["pid"]
        elif "refused" in message:
            state.error = message["error"]
        else:
            state.exit_code, state.has_ended = message["code"], True


def _resolve_future(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def make_exit_error(spec: ServiceSpec, exit_code: int | None) -> ProcessExitedError:
    """Return the error for a dead service on one line: its exit code, the cause, and how to read
    its log.

    `details` has the name of the `service`, and the `cause` if its log ends with one. Our own
    processes end their log with an error code and the cause; of others the last line is shown.
    """
    if exit_code is not None and exit_code < 0:
        how = f"was killed by signal {-exit_code}"
    else:
        how = f"exited with code {exit_code}"
    cause = _find_cause(read_last_lines(spec.log))
    return ProcessExitedError(
        f"{spec.name} {how}{cause}; {spec.log_advice}",
        service=spec.name,
        cause=cause.removeprefix(": "),
    )


def _find_cause(last_lines: str) -> str:
    """Return the continuation of an error message that tells the cause by the end of a log."""
    lines = [line.strip() for line in last_lines.splitlines() if line.strip()]
    if not lines:
        return "; it wrote nothing"
    # What an environment has loaded may write a little more after the cause.
    for line in reversed(lines[-MAX_LINES_AFTER_CAUSE:]):
        code, _, cause = line.partition(": ")
        if code == RLEnvironmentError.code:  # The name of the process says it already.
            return f": {cause}"
        if code in list_error_codes():
            return f": {line}"
    return f"; its last line: {shorten(lines[-1], MAX_LINE_CHARS)}"
