"""Run the launcher: a local Prefect server on SQLite and our runner, ended in the right order.

    python -m deployments.up [--port N] [--until-stdin-closes]

It is run from the checkout. With PREFECT_API_URL set, that server is used and only the runner is
started. Prefect itself is not imported here: a process that has imported it can hang at exit when
its server is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deployments.page_server import PageServer
from deployments.run_lines import RunLines
from lachesis.base import paths
from lachesis.base.api_keys import adopt_keys
from lachesis.base.bounded_child import signal_group
from lachesis.base.errors import LachesisError, ProcessExitedError, RunStateError
from lachesis.base.files import read_last_lines, storage_errors
from lachesis.base.secrets import build_child_env
from lachesis.prefect_client.background_serve import (
    READY_LINE,
    find_running_server,
    get_deployment_suffix,
    read_max_runs_setting,
    read_monitor_interval_s,
    require_other_server,
)
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.serve_info import (
    read_auth_string,
    remove_server_info,
    write_server_info,
)
from lachesis.supervision.leftovers import LAUNCHER_MARK_VARIABLE, find_flow_processes
from lachesis.supervision.process_marks import build_mark, find_processes, terminate_processes
from lachesis.supervision.services.ports import check_port, choose_port

CHECKOUT = Path(__file__).resolve().parent.parent
# Time limit for the start of the server and of the runner, for one that hangs.
START_TIMEOUT_S = 180.0
# Time limit for the end of all runs, which end concurrently; the trainer's checkpoint takes
# longest.
RUNS_END_TIMEOUT_S = 240.0
# Time limit for a flow's process, which otherwise keeps calling a server that is gone.
FLOW_END_TIMEOUT_S = 10.0
PREFERRED_PORT = 4200
NEXT_STEPS = """\
next, in another terminal: lachesis train arithmetic --watch
Ctrl-C ends the server and the runner; runs save a checkpoint first."""
PREFECT_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    "PREFECT_SERVER_UI_API_URL": "/api",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "1209600",
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P1D",  # A tick of the monitor makes ten events.
    "PREFECT_RUNNER_POLL_FREQUENCY": "1",
    "PREFECT_CLIENT_MAX_RETRIES": "8",  # The runner survives an outage of minutes.
    "PREFECT_LOGGING_EXTRA_LOGGERS": "lachesis",
    "PREFECT_CLI_PROMPT": "false",
}
# Pauses before the server or the runner is restarted; after the last one the launcher gives up.
RESTART_PAUSES_S = (1.0, 5.0, 15.0)
# A process that has run this long has all its restarts again.
RESTART_RESET_S = 600.0


@dataclass
class ManagedProcess:
    """Hold the state of the server or the runner."""

    name: str
    command: list[str]
    env: dict[str, str]
    grace_s: float
    is_ready: Callable[[], bool]
    timeout_s: float
    process: subprocess.Popen[bytes] = field(init=False)
    started_at: float = 0.0
    num_deaths: int = 0


class Launcher:
    """Start the server and the runner, restart them if they die, and end the runner first.

    Runs survive the server, and those of a dead runner end with a checkpoint and can be resumed.
    """

    def __init__(self, home: Path, port: int | None) -> None:
        self.home, self.port = home, port
        # The runner and all runs inherit them.
        self.key_places = adopt_keys()
        self.logs = home / "logs"
        self.children: list[ManagedProcess] = []
        self.page_server = PageServer(home)
        self.stop_event = threading.Event()

    def run(self) -> int:
        """Run until SIGTERM or until a part cannot be restarted; return 0 in the first case."""
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A handler only sets the event, because it may interrupt any statement.
            signal.signal(signal_number, lambda *_: self.stop_event.set())
        try:
            with self._hold_launcher_lock():
                # Check the settings before anything is started.
                read_max_runs_setting(), read_monitor_interval_s()
                try:
                    self._start_all()
                    self._watch()
                finally:
                    self._end_all()
            return 0
        except LachesisError as error:
            print(f"{error.code}: {error}", file=sys.stderr, flush=True)
            return 1

    def _watch(self) -> None:
        is_stopping, run_lines = False, RunLines(self.home)
        while not is_stopping:
            is_stopping = self.stop_event.wait(0.5)
            run_lines.print_changes()
            self.page_server.restart_if_dead()
            for child in self.children:
                if child.process.poll() is not None:
                    self._restart_child(child)

    def _restart_child(self, child: ManagedProcess) -> None:
        """Restart the server or the runner; during shutdown only the server, which the runner
        needs.

        Raises:
            ProcessExitedError: It has died too often.
        """
        if self.stop_event.is_set() and child.name == "runner":
            return
        if time.monotonic() - child.started_at > RESTART_RESET_S:
            child.num_deaths = 0
        if child.num_deaths >= len(RESTART_PAUSES_S):
            raise ProcessExitedError(self._describe_death(child))
        pause = RESTART_PAUSES_S[child.num_deaths]
        child.num_deaths += 1
        print(
            f"restarting in {pause:g} s: {self._describe_death(child).splitlines()[0]}",
            file=sys.stderr,
            flush=True,
        )
        if not self.stop_event.wait(pause) or child.name == "server":
            self._spawn(child, is_restart=True)
            self._wait_until_ready(child, is_restart=True)
            self._write_server_info()

    @contextlib.contextmanager
    def _hold_launcher_lock(self) -> Iterator[None]:
        """Allow one launcher per home.

        Its children hold the lock too, so that after a kill no second server opens the database.
        """
        with storage_errors(self.logs):
            self.logs.mkdir(parents=True, exist_ok=True)
        with open(self.home / "launcher.lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                server_info = find_running_server()
                if server_info is not None and psutil.pid_exists(server_info["pid"]):
                    raise RunStateError(
                        f"the server is already running: {server_info['ui_url']}, for "
                        f"{self.home}; `lachesis serve --stop` ends it"
                    ) from None
                raise RunStateError(
                    f"another launcher runs in {self.home}, or a killed one has left a server and "
                    f"a runner; `lachesis doctor` says which, and `lachesis doctor --fix` ends the "
                    "latter, each run with a checkpoint"
                ) from None
            self.lock_fd = lock.fileno()
            yield

    def _start_all(self) -> None:
        url = os.environ.get("PREFECT_API_URL")
        if url:
            require_other_server(url, self.port)
        else:
            url = f"http://127.0.0.1:{self._spawn_server()}/api"
        env = {
            **os.environ,
            "PREFECT_API_URL": url,
            "LACHESIS_DEPLOYMENT": get_deployment_suffix(self.home),
        }
        if auth := read_auth_string():
            env["PREFECT_API_AUTH_STRING"] = auth
        log = self.logs / "runner.log"
        command = [sys.executable, "-m", "deployments.runner"]
        runner = ManagedProcess(
            "runner",
            command,
            env,
            RUNS_END_TIMEOUT_S,
            lambda: READY_LINE in read_last_lines(log, 200),
            START_TIMEOUT_S,
        )
        self._spawn(runner)  # It loads Prefect while the server starts, and then waits for it.
        for child in self.children:
            self._wait_until_ready(child)
        self.api_url = url
        self._write_server_info()
        self.page_server.start()
        print(f"ready: {url.removesuffix('/api')}\n{NEXT_STEPS}", flush=True)

    def _write_server_info(self) -> None:
        """Write where the server is, for the other processes of this home."""
        write_server_info(
            self.home,
            {
                "api_url": self.api_url,
                "pids": {child.name: child.process.pid for child in self.children},
                "max_runs": read_max_runs_setting(),
                "key_places": self.key_places,
            },
        )

    def _spawn_server(self) -> int:
        if self.port is not None:
            check_port(self.port)
        port = self.port or choose_port(PREFERRED_PORT)
        program = [sys.executable, "-m", "deployments.prefect_server"]
        command = [*program, "--host", "127.0.0.1", "--port", str(port)]
        # Browsers may call it from its own pages only: whoever can change a deployment can run
        # programs here.
        allowed_origins = f"http://127.0.0.1:{port},http://localhost:{port}"
        env = build_child_env(
            {
                "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": allowed_origins,
                "PREFECT_UI_URL": f"http://127.0.0.1:{port}",
            }
        )
        server_env = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PREFECT_SERVER_", "LACHESIS_SERVER_"))
        }
        if auth := read_auth_string():
            server_env["PREFECT_SERVER_API_AUTH_STRING"] = auth
        api = PrefectApi(f"http://127.0.0.1:{port}/api")
        env |= server_env
        self._spawn(ManagedProcess("server", command, env, 10.0, api.is_healthy, START_TIMEOUT_S))
        return port

    def _spawn(self, child: ManagedProcess, *, is_restart: bool = False) -> None:
        log = self.logs / f"{child.name}.log"
        # The log of the process that has died says why.
        if log.exists() and is_restart:
            os.replace(log, log.with_suffix(".log.1"))
        log.unlink(missing_ok=True)
        with log.open("ab") as stream:
            child.process = subprocess.Popen(
                child.command,
                cwd=CHECKOUT,
                env={
                    **PREFECT_SETTINGS,
                    **child.env,
                    "PREFECT_HOME": str(self.home / "prefect"),
                    LAUNCHER_MARK_VARIABLE: build_mark(self.home),
                },
                pass_fds=(self.lock_fd,),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        child.started_at = time.monotonic()
        if child not in self.children:
            self.children.append(child)

    def _wait_until_ready(self, child: ManagedProcess, *, is_restart: bool = False) -> None:
        """Wait until a process that was started is ready; the runner is not without its server.

        Raises:
            ProcessExitedError: One has died.
            RunStateError: The launcher was asked to end.
        """
        log = self.logs / f"{child.name}.log"
        while not child.is_ready():
            dead = next((each for each in self.children if each.process.poll() is not None), None)
            if dead is not None and not is_restart:
                raise ProcessExitedError(self._describe_death(dead))
            if self.stop_event.is_set() and not is_restart:
                raise RunStateError("told to end while starting")
            if dead is not None or (self.stop_event.is_set() and child.name == "runner"):
                return  # the watch looks after it
            if time.monotonic() - child.started_at > child.timeout_s:
                raise ProcessExitedError(
                    f"the {child.name} is not ready after {child.timeout_s:.0f} s, see {log}"
                )
            time.sleep(0.1)

    def _describe_death(self, child: ManagedProcess) -> str:
        log = self.logs / f"{child.name}.log"
        code = child.process.returncode
        last_lines = read_last_lines(log)
        return (
            f"the Prefect {child.name} exited with code {code}, see {log}; its last lines:\n"
            f"{last_lines}"
        )

    def _end_all(self) -> None:
        """End the runner, wait, and end the server, which the runner needs to report how its runs
        ended.
        """
        remove_server_info(self.home)
        self.page_server.end()
        for child in reversed(self.children):
            signal_group(child.process.pid, signal.SIGTERM)
            self._wait_for_end(child)
            if child.name == "runner":
                self._end_runs()

    def _wait_for_end(self, child: ManagedProcess) -> None:
        """Kill a process when its time is over; restart the server if it dies while the runner
        needs it.
        """
        servers = [
            other_child
            for other_child in self.children
            if (child.name, other_child.name) == ("runner", "server")
        ]
        until, num_restarts = time.monotonic() + child.grace_s, 0
        while time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(0.5)
                return
            for server in servers:
                if server.process.poll() is not None and num_restarts < len(RESTART_PAUSES_S):
                    num_restarts += 1
                    # A full disk must not prevent the end of the runner.
                    with contextlib.suppress(OSError):
                        self._spawn(server, is_restart=True)
        signal_group(child.process.pid, signal.SIGKILL)
        child.process.wait()

    def _end_runs(self) -> None:
        """Wait for the runs of a runner that has died, and kill those that do not end.

        Each run notices by itself, ends with a checkpoint, and reports its end to the server.
        """
        until = time.monotonic() + RUNS_END_TIMEOUT_S
        while (
            remaining := [
                process for processes in find_processes(self.home).values() for process in processes
            ]
        ) and time.monotonic() < until:
            time.sleep(0.5)
        terminate_processes(remaining)
        _, remaining = psutil.wait_procs(find_flow_processes(self.home), timeout=FLOW_END_TIMEOUT_S)
        terminate_processes(remaining)


def main() -> int:
    """Parse the arguments, run the launcher, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deployments.up", description=__doc__)
    parser.add_argument(
        "--port", type=int, help="port of the Prefect server (default: 4200, or a free one)"
    )
    parser.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="end when the process that started the launcher is gone",
    )
    args = parser.parse_args()
    os.umask(0o077)  # The server, the runner and all their children inherit it.
    launcher = Launcher(paths.home(), args.port)
    if args.until_stdin_closes:

        def stop_when_stdin_closes() -> None:
            while os.read(0, 4096):  # The lock of sys.stdin would abort the interpreter at exit.
                pass
            launcher.stop_event.set()

        threading.Thread(target=stop_when_stdin_closes, daemon=True).start()
    return launcher.run()


if __name__ == "__main__":
    sys.exit(main())
