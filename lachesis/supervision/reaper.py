"""The process that starts a run's services and ends them in reverse order, whatever happens to the flow.

Standard library only: it is run as `python -S reaper.py`. It reads JSON lines {"name", "argv", "env", "cwd", "log",
"grace_s", "secrets", "log_bytes"} from stdin, or {"stop": NAME}, and writes {"started": NAME, "pid": N}, {"refused": NAME,
"error": TEXT} and {"exited": NAME, "code": N} to stdout. The end of stdin means that the flow has ended or died: every service
is sent SIGTERM, after its grace SIGKILL, the whole process group, the last one started first.

What the services say goes through here into their logs: without the values of `secrets`, and each log and the one before it no
larger than `log_bytes`. While the file that its argument names is there, SIGKILL comes without a grace.
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
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LONGEST_LINE = 1 << 20
LAST_WORDS_S = 1.0
"""How long the end of a service's log is waited for; a grandchild that lives on holds it open."""
try:
    LIBC: Any = ctypes.CDLL(None)  # here, as a child between fork and exec must not load anything
except (OSError, TypeError):
    LIBC = None


def prepare_child() -> None:
    """In a child: hear the signals that the reaper ignores, and die when the reaper dies, so that even SIGKILL to it leaves
    no service (the latter on Linux only)."""
    for one in IGNORED:
        signal.signal(one, signal.SIG_DFL)
    with contextlib.suppress(AttributeError):
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Log(threading.Thread):
    """Copies what a service says, line by line, until nobody holds the other end any more."""

    def __init__(self, source: int, path: str, secrets: list[str], most_bytes: int) -> None:
        super().__init__(daemon=True)
        self.source, self.path, self.most_bytes = source, path, most_bytes
        self.secrets = sorted((one.encode() for one in secrets), key=len, reverse=True)
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115

    def run(self) -> None:
        rest = b""
        while chunk := os.read(self.source, 65536):
            rest = self.redacted(rest + chunk)
            cut = rest.rfind(b"\n") + 1
            if not cut and len(rest) > LONGEST_LINE:
                cut = len(rest) - max(map(len, self.secrets), default=0)  # a secret may have begun
            self.write(rest[:cut])
            rest = rest[cut:]
        self.write(rest)
        os.close(self.source)

    def redacted(self, text: bytes) -> bytes:
        for secret in self.secrets:
            text = text.replace(secret, b"***")
        return text

    def write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not stop the service
            if self.file.tell() + len(text) > self.most_bytes // 2:
                os.replace(self.path, f"{self.path}.1")
                self.file.close()
                self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            self.file.write(text)


class Reaper:
    def __init__(self) -> None:
        self.services: dict[str, tuple[subprocess.Popen[bytes], float]] = {}  # with the grace in seconds, in order of start
        self.logs: dict[str, Log] = {}
        self.ending: list[threading.Thread] = []
        self.voice = threading.Lock()

    def tell(self, **message: Any) -> None:
        with self.voice, contextlib.suppress(OSError):  # the flow may be gone; its services still have to be ended
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()

    def start(self, spec: dict[str, Any]) -> None:
        name = spec["name"]
        reading, writing = os.pipe()
        try:
            log = Log(reading, spec["log"], spec["secrets"], spec["log_bytes"])
            process = subprocess.Popen(
                spec["argv"],
                env=spec["env"],
                cwd=spec["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                preexec_fn=prepare_child,
            )
        except OSError as error:
            os.close(reading)
            self.tell(refused=name, error=str(error))
            return
        finally:
            os.close(writing)
        log.start()
        self.services[name], self.logs[name] = (process, spec["grace_s"]), log
        self.tell(started=name, pid=process.pid)

    def report_exits(self) -> None:
        for name, (process, _) in list(self.services.items()):
            if process.poll() is not None:
                self.end_beside(name)

    def end_beside(self, name: str) -> None:
        """As `end`, while the others are looked after."""
        self.ending = [one for one in self.ending if one.is_alive()]
        self.ending.append(threading.Thread(target=self.end, args=(name, *self.services.pop(name), self.logs.pop(name))))
        self.ending[-1].start()

    def end(self, name: str, process: subprocess.Popen[bytes], grace_s: float, log: Log) -> None:
        """SIGTERM, grace, SIGKILL, to the whole group; also when its leader has already exited. The leader's end is told at
        once, whatever its children do."""
        told = False
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
                os.killpg(process.pid, number)
            until = time.monotonic() + patience_s
            while alive(process) and time.monotonic() < until and not (number == signal.SIGTERM and hurried()):
                if not told and process.returncode is not None:
                    told = self.told_end(name, process, log)
                time.sleep(POLL_S)
            if not alive(process):
                break
        if not told:
            self.told_end(name, process, log)

    def told_end(self, name: str, process: subprocess.Popen[bytes], log: Log) -> bool:
        """After its last words are in the log."""
        log.join(LAST_WORDS_S)
        self.tell(exited=name, code=process.poll())
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
                        self.end_beside(message["stop"])
            self.report_exits()
        for name in reversed(list(self.services)):
            self.end(name, *self.services.pop(name), self.logs.pop(name))
        for thread in self.ending:
            thread.join()


def hurried() -> bool:
    return len(sys.argv) > 1 and os.path.exists(sys.argv[1])


def alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return process.returncode is None
    return True


if __name__ == "__main__":
    for one in IGNORED:
        signal.signal(one, signal.SIG_IGN)
    Reaper().run()
