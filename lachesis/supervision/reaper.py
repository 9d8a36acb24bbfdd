"""The process that starts a run's services and ends them in reverse order, whatever happens to the
flow.

Standard library only: it is run as `python -S reaper.py`. It reads JSON lines {"name", "argv",
"env", "cwd", "log", "grace_s", "secrets", "log_bytes"} from stdin, or {"stop": NAME}, and writes
{"started": NAME, "pid": N}, {"refused": NAME, "error": TEXT} and {"exited": NAME, "code": N} to
stdout. The end of stdin means that the flow has ended or died: every service is sent SIGTERM, after
its grace SIGKILL, the whole process group, the last one started first.

What the services say goes through here into their logs: without the values of `secrets`, and each
log and the one before it no larger than `log_bytes`. While the file that its argument names is
there, SIGKILL comes without a grace.
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
LOG_DRAIN_TIMEOUT_S = 1.0
"""How long the end of a service's log is waited for; a grandchild that lives on holds it open."""
try:
    LIBC: Any = ctypes.CDLL(None)  # here, as a child between fork and exec must not load anything
except (OSError, TypeError):
    LIBC = None


def prepare_child() -> None:
    """In a child: hear the signals that the reaper ignores, and die when the reaper dies, so that
    even SIGKILL to it leaves no service (the latter on Linux only).
    """
    for signal_number in IGNORED_SIGNALS:
        signal.signal(signal_number, signal.SIG_DFL)
    with contextlib.suppress(AttributeError):
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class LogCopier(threading.Thread):
    """Copies what a service says, line by line, until nobody holds the other end any more."""

    def __init__(self, source_fd: int, path: str, secrets: list[str], max_bytes: int) -> None:
        super().__init__(daemon=True)
        self.source_fd, self.path, self.max_bytes = source_fd, path, max_bytes
        self.secrets = sorted((secret.encode() for secret in secrets), key=len, reverse=True)
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115

    def run(self) -> None:
        rest = b""
        while chunk := os.read(self.source_fd, 65536):
            rest = self.redact(rest + chunk)
            cut = rest.rfind(b"\n") + 1
            if not cut and len(rest) > MAX_LINE_BYTES:
                cut = len(rest) - max(map(len, self.secrets), default=0)  # a secret may have begun
            self.write(rest[:cut])
            rest = rest[cut:]
        self.write(rest)
        os.close(self.source_fd)

    def redact(self, text: bytes) -> bytes:
        for secret in self.secrets:
            text = text.replace(secret, b"***")
        return text

    def write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not stop the service
            if self.file.tell() + len(text) > self.max_bytes // 2:
                os.replace(self.path, f"{self.path}.1")
                self.file.close()
                self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            self.file.write(text)


class Reaper:
    def __init__(self) -> None:
        # with the grace in seconds, in order of start
        self.services: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.logs: dict[str, LogCopier] = {}
        self.ending_threads: list[threading.Thread] = []
        self.stdout_lock = threading.Lock()

    def send_message(self, **message: Any) -> None:
        # the flow may be gone; its services still have to be ended
        with self.stdout_lock, contextlib.suppress(OSError):
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()

    def start(self, spec: dict[str, Any]) -> None:
        name = spec["name"]
        read_fd, write_fd = os.pipe()
        try:
            log = LogCopier(read_fd, spec["log"], spec["secrets"], spec["log_bytes"])
            process = subprocess.Popen(
                spec["argv"],
                env=spec["env"],
                cwd=spec["cwd"],
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
            os.close(write_fd)
        log.start()
        self.services[name], self.logs[name] = (process, spec["grace_s"]), log
        self.send_message(started=name, pid=process.pid)

    def reap_exited(self) -> None:
        for name, (process, _) in list(self.services.items()):
            if process.poll() is not None:
                self.end_in_background(name)

    def end_in_background(self, name: str) -> None:
        """As `end`, while the others are looked after."""
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
        """SIGTERM, grace, SIGKILL, to the whole group; also when its leader has already exited. The
        leader's end is told at once, whatever its children do.
        """
        is_exit_reported = False
        for signal_number, timeout_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            # macOS: EPERM for a group of zombies
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
        """After its last words are in the log."""
        log.join(LOG_DRAIN_TIMEOUT_S)
        self.send_message(exited=name, code=process.poll())
        return True

    def run(self) -> None:
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
        for name in reversed(list(self.services)):
            self.end_service(name, *self.services.pop(name), self.logs.pop(name))
        for thread in self.ending_threads:
            thread.join()


def should_kill_now() -> bool:
    return len(sys.argv) > 1 and os.path.exists(sys.argv[1])


def is_group_alive(process: subprocess.Popen[bytes]) -> bool:
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
