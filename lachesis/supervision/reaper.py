"""Start a run's services and end them in reverse order, whatever happens to the flow.

It is run as `python -S reaper.py`, so it uses the standard library only. It reads JSON lines
{"name", "argv", "env", "cwd", "log", "grace_s", "secrets", "log_bytes"} or {"stop": NAME} from
stdin, and writes {"started": NAME, "pid": N}, {"refused": NAME, "error": TEXT} and {"exited": NAME,
"code": N} to stdout. The end of stdin means that the flow has ended or died: the process group of
every service gets SIGTERM and after its grace period SIGKILL, the last one started first. The
output of the services is copied to their logs without the values of `secrets`, and each log and its
predecessor stay below `log_bytes`. While the file in its argument exists, SIGKILL comes at once.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

POLL_S = 0.05
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_LINE_BYTES = 1 << 20
# How long to wait for the end of a service's output; a grandchild that is alive keeps it open.
LOG_DRAIN_TIMEOUT_S = 1.0
try:
    # Loaded here, because a child between fork and exec must not load anything.
    LIBC: Any = ctypes.CDLL(None)
except (OSError, TypeError):
    LIBC = None


def prepare_child() -> None:
    """Prepare a child after fork: restore signals that the reaper ignores, and die with the reaper.

    On Linux even SIGKILL to the reaper then leaves no service.
    """
    for signal_number in IGNORED_SIGNALS:
        signal.signal(signal_number, signal.SIG_DFL)
    with contextlib.suppress(AttributeError):
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class LogCopier(threading.Thread):
    """Copy the output of a service to its log line by line, until no process can write to it."""

    def __init__(self, source_fd: int, path: str, secrets: list[str], max_bytes: int) -> None:
        super().__init__(daemon=True)
        self.source_fd, self.path, self.max_bytes = source_fd, path, max_bytes
        # Longer secrets first, because a secret may be part of another one.
        self.secrets = sorted((secret.encode() for secret in secrets), key=len, reverse=True)
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115

    def run(self) -> None:
        """Copy until the end of the output."""
        rest = b""
        while chunk := os.read(self.source_fd, 65536):
            rest = self.redact(rest + chunk)
            # Only whole lines are written, because a secret may be split between two reads.
            cut = rest.rfind(b"\n") + 1
            if not cut and len(rest) > MAX_LINE_BYTES:
                # Keep the end, which may be the beginning of a secret.
                cut = len(rest) - max(map(len, self.secrets), default=0)
            self.write(rest[:cut])
            rest = rest[cut:]
        self.write(rest)
        self.file.close()
        os.close(self.source_fd)

    def redact(self, text: bytes) -> bytes:
        """Return the text with secrets replaced."""
        for secret in self.secrets:
            text = text.replace(secret, b"***")
        return text

    def write(self, text: bytes) -> None:
        """Append to the log, and move it aside if it has reached half of its limit."""
        with contextlib.suppress(OSError):  # A full disk must not stop the service.
            if self.file.tell() + len(text) > self.max_bytes // 2:
                self._rotate()
        with contextlib.suppress(OSError):
            self.file.write(text)

    def _rotate(self) -> None:
        """Move the log aside and begin a new file; if that fails, continue with the old file."""
        with contextlib.suppress(FileNotFoundError):  # An earlier attempt has moved it already.
            os.replace(self.path, f"{self.path}.1")
        new_file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        self.file.close()
        self.file = new_file


class Reaper:
    """Start, watch and end services as the flow requests."""

    def __init__(self) -> None:
        # Processes and their grace periods in seconds, in the order of their start.
        self.services: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.logs: dict[str, LogCopier] = {}
        self.ending_threads: list[threading.Thread] = []
        self.stdout_lock = threading.Lock()

    def send_message(self, **message: object) -> None:
        """Send a message to the flow."""
        # The flow may be gone, but its services still have to be ended.
        with self.stdout_lock, contextlib.suppress(OSError):
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()

    def start(self, spec: dict[str, Any]) -> None:
        """Start a service and report it."""
        name = spec["name"]
        read_fd, write_fd = os.pipe()
        try:
            log = LogCopier(read_fd, spec["log"], spec["secrets"], spec["log_bytes"])
            process = subprocess.Popen(
                spec["argv"],
                env=spec["env"],
                cwd=spec["cwd"],
                # A service leads a session of its own, so that its children can be ended with it.
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                start_new_session=True,
                preexec_fn=prepare_child,
            )
        except OSError as error:
            os.close(read_fd)
            self.send_message(refused=name, error=str(error))
            return
        finally:
            # Only the service may hold the writing end, or its log would never end.
            os.close(write_fd)
        log.start()
        self.services[name], self.logs[name] = (process, spec["grace_s"]), log
        self.send_message(started=name, pid=process.pid)

    def reap_exited(self) -> None:
        """Report the services that have ended."""
        # Children of a service that has exited may be alive; ending it ends its whole group.
        for name, (process, _) in list(self.services.items()):
            if process.poll() is not None:
                self.end_in_background(name)

    def end_in_background(self, name: str) -> None:
        """End one service while the others are still watched."""
        self.ending_threads = [thread for thread in self.ending_threads if thread.is_alive()]
        self.ending_threads.append(
            threading.Thread(
                target=self.end_service, args=(name, *self.services.pop(name), self.logs.pop(name))
            )
        )
        self.ending_threads[-1].start()

    def end_service(
        self, name: str, process: subprocess.Popen[bytes], grace_s: float, log: LogCopier
    ) -> None:
        """Send SIGTERM to the service's whole group, and after its grace period SIGKILL.

        This includes groups whose leader has exited. The leader's exit is reported at once,
        whatever its children do.
        """
        is_exit_reported = False
        for signal_number, timeout_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            # macOS returns EPERM for a group of zombies.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal_number)
            until = time.monotonic() + timeout_s
            while (
                is_group_alive(process)
                and time.monotonic() < until
                and not (signal_number == signal.SIGTERM and should_kill_now())
            ):
                if not is_exit_reported and process.returncode is not None:
                    is_exit_reported = self.report_exit(name, process, log)
                time.sleep(POLL_S)
            if not is_group_alive(process):
                break
        if not is_exit_reported:
            self.report_exit(name, process, log)

    def report_exit(self, name: str, process: subprocess.Popen[bytes], log: LogCopier) -> bool:
        """Report an exit after the last output was copied to the log."""
        log.join(LOG_DRAIN_TIMEOUT_S)
        self.send_message(exited=name, code=process.poll())
        return True

    def run(self) -> None:
        """Handle requests until stdin ends, then end all services."""
        buffer = b""
        while True:
            ready, _, _ = select.select([0], [], [], POLL_S)
            if ready:
                chunk = os.read(0, 65536)
                if not chunk:
                    break
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "stop" not in message:
                        self.start(message)
                    elif message["stop"] in self.services:
                        self.end_in_background(message["stop"])
            self.reap_exited()
        # A service depends on those that were started before it, so the last one ends first.
        for name in reversed(list(self.services)):
            self.end_service(name, *self.services.pop(name), self.logs.pop(name))
        for thread in self.ending_threads:
            thread.join()


def should_kill_now() -> bool:
    """Return whether services get no time to end."""
    return len(sys.argv) > 1 and os.path.exists(sys.argv[1])


def is_group_alive(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process of the group still exists."""
    # A zombie keeps its group in existence until somebody has read its exit code.
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return process.returncode is None
    return True


if __name__ == "__main__":
    for signal_number in IGNORED_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    Reaper().run()
