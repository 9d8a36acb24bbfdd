"""Run a local Prefect server on SQLite, our runner and the pages, and end them in the right order.

    python -m deployments.serve [--port N]

It is what `lachesis serve` becomes, and is run from the checkout. With PREFECT_API_URL set, that
server is used and only the runner and the pages are started. Prefect itself is not imported here: a
process that has imported it can hang at exit when its server is gone.
"""

import argparse
import contextlib
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from deployments.run_lines import RunLines
from lachesis.base import paths
from lachesis.base.api_keys import adopt_keys
from lachesis.base.errors import LachesisError, RunStateError
from lachesis.base.files import make_private_folder, read_last_lines, storage_errors
from lachesis.base.http_guard import load_or_create_token
from lachesis.base.managed_process import ManagedProcess, end_with_parent
from lachesis.base.secrets import build_child_env
from lachesis.config.value_parsing import read_env_number
from lachesis.prefect_client.background_serve import (
    READY_LINE,
    find_running_server,
    get_deployment_suffix,
    read_max_runs_setting,
    read_monitor_interval_s,
    require_other_server,
)
from lachesis.prefect_client.serve_info import (
    RUNNER,
    SERVER,
    read_auth_string,
    remove_server_info,
    write_server_info,
)
from lachesis.supervision.leftovers import LAUNCHER_MARK_VARIABLE, find_flow_processes
from lachesis.supervision.process_marks import build_mark, find_processes, terminate_processes
from lachesis.supervision.services.ports import check_port, choose_port, open_listener
from lachesis.web.server import PREFERRED_PORT as PREFERRED_PAGES_PORT
from lachesis.web.server import find_page_server
from lachesis.web.sign_in import make_sign_in_link

CHECKOUT = Path(__file__).resolve().parent.parent
PREFERRED_PORT = 4200
# The port of the pages; 0 serves none.
PAGES_PORT_VARIABLE = "LACHESIS_PAGES_PORT"
# Time limit for the start of the server and of the runner.
START_TIMEOUT_S = 180.0
# Time limit for the end of all runs, which end concurrently; the trainer's checkpoint takes
# longest.
RUNS_END_TIMEOUT_S = 240.0
# Time limit for a flow's process, which otherwise keeps calling a server that is gone.
FLOW_END_TIMEOUT_S = 10.0
POLL_S = 0.5
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


class Launcher:
    """Start the server, the runner and the pages, restart what dies, and end the runner first.

    Runs survive the server, and those of a dead runner end with a checkpoint and can be resumed.
    """

    def __init__(self, home: Path, port: int | None) -> None:
        self.home, self.port, self.logs = home, port, home / "logs"
        # The runner and all runs inherit them.
        self.key_places = adopt_keys()
        self.stop_event = threading.Event()
        self.api_url = ""
        # The server and the runner, in the order of their start.
        self.children: dict[str, ManagedProcess] = {}
        # The lock of the home, which they hold too.
        self.lock_fd: int | None = None
        # The pages only read, so nothing depends on them.
        self.pages: ManagedProcess | None = None
        self._pages_listener: socket.socket | None = None

    def run(self) -> int:
        """Run until SIGTERM; return 0, or 1 if a part could not be started."""
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

    @contextlib.contextmanager
    def _hold_launcher_lock(self) -> Iterator[None]:
        """Hold the home's lock, so that only one launcher of a home runs.

        Its server and its runner hold the lock too, so that after a kill no second server opens the
        database.
        """
        with storage_errors(self.logs):
            make_private_folder(self.logs)
        with open(self.home / "launcher.lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if server_info := find_running_server():
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

    # --- start

    def _start_all(self) -> None:
        """Start the server, unless a variable names a server, then the runner and the pages."""
        configured_url = os.environ.get("PREFECT_API_URL")
        if configured_url:
            require_other_server(configured_url, self.port)
            self.api_url = configured_url
        else:
            self._start_server()
        runner = self._start_child(
            RUNNER,
            [sys.executable, "-m", "deployments.runner"],
            {
                **os.environ,
                "PREFECT_API_URL": self.api_url,
                "LACHESIS_DEPLOYMENT": get_deployment_suffix(self.home),
                **_name_auth("PREFECT_API_AUTH_STRING"),
            },
        )
        # The runner loads Prefect while the server starts, and then waits for it.
        runner.wait_until_ready(lambda: self._is_ready(runner), START_TIMEOUT_S)
        self._write_server_info()
        self._start_pages()
        print(f"ready: {self.api_url.removesuffix('/api')}\n{NEXT_STEPS}", flush=True)

    def _is_ready(self, runner: ManagedProcess) -> bool:
        """Return whether the runner is ready.

        Raises:
            ProcessExitedError: The server has died.
            RunStateError: The launcher was asked to end.
        """
        if self.stop_event.is_set():
            raise RunStateError("told to end while starting")
        for child in self.children.values():
            child.require_running()
        return READY_LINE in read_last_lines(runner.log, 200)

    def _start_server(self) -> None:
        """Start the Prefect server on the requested port, or on a free port."""
        if self.port is not None:
            check_port(self.port)
        port = self.port or choose_port(PREFERRED_PORT)
        self.api_url = f"http://127.0.0.1:{port}/api"
        settings = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PREFECT_SERVER_", "LACHESIS_SERVER_"))
        }
        self._start_child(
            SERVER,
            [
                *(sys.executable, "-m", "deployments.prefect_server"),
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            build_child_env(
                {
                    # Browsers may call it from its own pages only: whoever can change a deployment
                    # can run programs here.
                    "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": (
                        f"http://127.0.0.1:{port},http://localhost:{port}"
                    ),
                    "PREFECT_UI_URL": f"http://127.0.0.1:{port}",
                    **settings,
                    **_name_auth("PREFECT_SERVER_API_AUTH_STRING"),
                }
            ),
        )

    def _start_child(self, name: str, command: list[str], env: dict[str, str]) -> ManagedProcess:
        """Start a child with the settings and the mark of this home, and keep it by its name."""
        child = ManagedProcess(
            f"Prefect {name}",
            command,
            self.logs / f"{name}.log",
            env={
                **PREFECT_SETTINGS,
                **env,
                "PREFECT_HOME": str(self.home / "prefect"),
                LAUNCHER_MARK_VARIABLE: build_mark(self.home),
            },
            cwd=CHECKOUT,
            pass_fds=() if self.lock_fd is None else (self.lock_fd,),
        )
        self.children[name] = child
        child.start()
        return child

    def _write_server_info(self) -> None:
        """Write where the server is, for the other processes of this home."""
        write_server_info(
            self.home,
            self.api_url,
            {name: child.pid for name, child in self.children.items()},
            max_runs=read_max_runs_setting(),
            key_places=self.key_places,
        )

    def _start_pages(self) -> None:
        """Start the pages unless they are served already, and print the link to them."""
        try:
            port = int(read_env_number(PAGES_PORT_VARIABLE, PREFERRED_PAGES_PORT, min_value=0))
            if not port:
                return
            address = find_page_server(self.home) or self._start_page_server(port)
            print(f"pages: {make_sign_in_link(address, load_or_create_token())}", flush=True)
        except (LachesisError, OSError) as error:
            print(f"the pages are not served: {error}", file=sys.stderr, flush=True)

    def _start_page_server(self, port: int) -> str:
        """Start the pages on the port, or a free one if that is in use; return their address."""
        # Kept open, so that the pages have the same address when they are started again.
        self._pages_listener = listener = open_listener(port)
        names = ("LACHESIS_HOME", "LACHESIS_TOKEN", "PREFECT_API_URL", "PREFECT_API_AUTH_STRING")
        passed_variables = {name: os.environ[name] for name in names if name in os.environ}
        self.pages = ManagedProcess(
            "page server",
            [sys.executable, "-m", "lachesis.web", "--listener", str(listener.fileno())],
            self.logs / "pages.log",
            env=build_child_env(
                {**passed_variables, LAUNCHER_MARK_VARIABLE: build_mark(self.home)}
            ),
            pass_fds=(listener.fileno(),),
            ends_with_parent=True,
        )
        self.pages.start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    # --- watch

    def _watch(self) -> None:
        """Print the changes of runs and restart dead children until the launcher shall end."""
        run_lines, problem = RunLines(self.home), ""
        while not self.stop_event.wait(POLL_S):
            try:
                run_lines.print_changes()
                self._restart_what_died()
            # The launcher holds server, runner and all runs, so no error may end it.
            except Exception as error:
                if problem != (problem := f"{type(error).__name__}: {error}"):
                    print(f"the watch goes on after {problem}", file=sys.stderr, flush=True)

    def _restart_what_died(self) -> None:
        if self.pages is not None:
            self.pages.restart_if_dead()
        if any([child.restart_if_dead() for child in self.children.values()]):
            # A full disk must not end the launcher, and all runs with it.
            with contextlib.suppress(LachesisError):
                self._write_server_info()

    # --- end

    def _end_all(self) -> None:
        """End the runner, wait, and end the server, to which the runner reports its ended runs."""
        remove_server_info(self.home)
        if self.pages is not None:
            self.pages.end()
        if self._pages_listener is not None:
            self._pages_listener.close()
        if runner := self.children.get(RUNNER):
            self._end_runner(runner)
        if server := self.children.get(SERVER):
            server.end()

    def _end_runner(self, runner: ManagedProcess) -> None:
        """End the runner and its runs; restart the server if it dies while the runner needs it."""
        runner.send_signal(signal.SIGTERM)
        until = time.monotonic() + RUNS_END_TIMEOUT_S
        while runner.wait(POLL_S) is None and time.monotonic() < until:
            if server := self.children.get(SERVER):
                server.restart_if_dead()
        runner.kill()
        self._end_runs()

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
            time.sleep(POLL_S)
        terminate_processes(remaining)
        _, remaining = psutil.wait_procs(find_flow_processes(self.home), timeout=FLOW_END_TIMEOUT_S)
        terminate_processes(remaining)


def _name_auth(variable: str) -> dict[str, str]:
    """Return the variable that tells a child the server's NAME:PASSWORD, if it requires any."""
    auth = read_auth_string()
    return {variable: auth} if auth else {}


def main() -> int:
    """Parse the arguments, run the launcher, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deployments.serve", description=__doc__)
    parser.add_argument(
        "--port", type=int, help="port of the Prefect server (default: 4200, or a free one)"
    )
    args = parser.parse_args()
    os.umask(0o077)  # The server, the runner and all their children inherit it.
    end_with_parent()
    return Launcher(paths.home(), args.port).run()


if __name__ == "__main__":
    sys.exit(main())
