"""Find, configure and start the Prefect server and the runner of a home."""

import hashlib
import os
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from lachesis.base import paths
from lachesis.base.errors import ConfigError, RunStateError, ServerDownError
from lachesis.base.files import hold_file_lock, make_private_folder, storage_errors
from lachesis.base.managed_process import ManagedProcess
from lachesis.base.waiting import wait_until
from lachesis.config.value_parsing import read_env_number
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.serve_info import LAUNCHER, read_processes, read_server_info

# The names of the flows, which are also those of their deployments.
TRAINING_FLOW = "train"
TEST_FLOW = "test"
MONITOR_FLOW = "monitor"
NIGHTLY_FLOW = "nightly"
# The value of $LACHESIS_DEPLOYMENT for deployments that are named after their flows alone.
LOCAL = "local"
# The line that the runner prints when it accepts runs.
READY_LINE = "runner is ready"
# Time limits for the start of the server and the runner, and for the end of both and all runs.
START_TIMEOUT_S, STOP_TIMEOUT_S = 180.0, 300.0


def get_deployment_suffix(home: Path) -> str:
    """Return the suffix of this home's deployments, which tells homes at one server apart.

    It is $LACHESIS_DEPLOYMENT, else a hash of the home if $PREFECT_API_URL names a server, else
    `local`, which means no suffix. A flow gets it from its runner.
    """
    configured_suffix = os.environ.get("LACHESIS_DEPLOYMENT")
    if configured_suffix or not os.environ.get("PREFECT_API_URL"):
        return configured_suffix or LOCAL
    return hashlib.sha256(f"{socket.gethostname()}:{home}".encode()).hexdigest()[:8]


def get_deployment_name(flow: str, home: Path) -> str:
    """Return the name of this home's deployment of a flow, `train` or `train-SUFFIX`."""
    suffix = get_deployment_suffix(home)
    if suffix == LOCAL:
        return flow
    return f"{flow}-{suffix}"


def find_running_server() -> dict[str, Any] | None:
    """Return the information file of this home's `serve`; None if its server does not respond."""
    server_info = read_server_info()
    if server_info is not None and PrefectApi(server_info["api_url"]).is_healthy():
        return server_info
    return None


def read_max_runs_setting() -> int:
    """Return the maximum number of concurrent training runs from $LACHESIS_MAX_RUNS.

    Raises:
        ConfigError: The value is not allowed.
    """
    return int(read_env_number("LACHESIS_MAX_RUNS", 4, min_value=1))


def read_monitor_interval_s() -> float:
    """Return the seconds between two ticks of the monitor from $LACHESIS_MONITOR_INTERVAL_S.

    Raises:
        ConfigError: The value is not allowed.
    """
    return read_env_number("LACHESIS_MONITOR_INTERVAL_S", 60, min_value=15)


def get_max_runs() -> int:
    """Return the maximum number of concurrent training runs of this home's launcher."""
    server_info = read_server_info()
    if server_info is None:
        return read_max_runs_setting()
    return int(server_info["max_runs"])


def require_server(home: Path) -> None:
    """Raise ServerDownError unless Prefect responds with this home's deployments."""
    find_deployment(TRAINING_FLOW, home)


def find_deployment(flow: str, home: Path) -> tuple[PrefectApi, Any]:
    """Return the server and this home's deployment of a flow.

    Raises:
        ServerDownError: The server does not respond, or has no such deployment.
    """
    api, name = PrefectApi(), get_deployment_name(flow, home)
    deployment = api.read_deployment(flow, name)
    if deployment is None:
        raise ServerDownError(
            f"the Prefect server at {api.url} has no deployment {flow}/{name}; start it with "
            "`lachesis serve`"
        )
    return api, deployment


def find_server_problem(home: Path) -> str | None:
    """Return which of server and runner is missing for a run to start; None if both are there."""
    try:
        api = PrefectApi()
        api.require_healthy()
        if (
            read_server_info() is None
            or api.read_deployment(TRAINING_FLOW, get_deployment_name(TRAINING_FLOW, home)) is None
        ):
            return (
                f"the Prefect server at {api.url} responds, but there is no runner of {home}; "
                f"start it with `lachesis serve`"
            )
    except ServerDownError as error:
        return str(error)
    return None


def read_key_names() -> dict[str, str] | None:
    """Return which API keys the running launcher has, or None if no launcher runs.

    A run is a child of the launcher, so it has the launcher's keys, not those of the shell in which
    a command was typed.

    Returns:
        The names of the keys, each with the value "set", as `check_profile` takes them.
    """
    server_info = read_server_info()
    if server_info is None:
        return None
    # The values stay with the launcher; only the names are written to disk.
    return dict.fromkeys(server_info["keys"], "set")


def make_serve_command(*options: str) -> list[str]:
    """Return the command that starts `serve`."""
    return [sys.executable, "-m", "deployments.serve", *options]


def _make_launcher(*, ends_with_parent: bool) -> ManagedProcess:
    """Return the launcher of this home, which is not started yet."""
    log = paths.home() / "logs" / "launcher.log"
    with storage_errors(log.parent):
        make_private_folder(log.parent)
    # Its session is its own, so that Ctrl-C in this terminal does not reach it.
    return ManagedProcess(
        "launcher",
        make_serve_command(),
        log,
        cwd=paths.project_dir(),
        ends_with_parent=ends_with_parent,
    )


def _start_launcher(launcher: ManagedProcess, timeout_s: float) -> None:
    """Start a launcher and wait until its server and its runner are ready; else end it."""
    launcher.start()
    try:
        # The file of an earlier launcher names processes that have ended.
        launcher.wait_until_ready(lambda: find_running_server() is not None, timeout_s)
    except BaseException:
        launcher.end(STOP_TIMEOUT_S)
        raise


def can_start_server() -> bool:
    """Return whether a server is ours to start: no launcher of this home runs, and no variable
    names a server that somebody else keeps.

    A launcher that runs starts its server again by itself.
    """
    return read_server_info() is None and not os.environ.get("PREFECT_API_URL")


def start_background_server(timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
    """Start a server and a runner that outlive this process, and return their information file.

    Callers that come at the same time get the same server. `stop_server` ends it.

    Raises:
        ProcessExitedError: The launcher has died, or was not ready in time; the message has the end
            of its log.
    """
    launcher = _make_launcher(ends_with_parent=False)
    with hold_file_lock(launcher.log.with_name("launcher-start.lock"), timeout_s=timeout_s):
        server_info = find_running_server()
        if server_info is not None:
            return server_info
        _start_launcher(launcher, timeout_s)
        launcher.leave_running()
        return read_server_info() or {}


def stop_server(timeout_s: float = STOP_TIMEOUT_S) -> dict[str, Any] | None:
    """End the launcher of this home with its server and runner; runs save a checkpoint first.

    Returns:
        What the launcher had written, or None if none runs.

    Raises:
        RunStateError: It has not ended in time.
    """
    server_info = read_server_info()
    if server_info is None:
        return None
    launcher = read_processes(server_info).get(LAUNCHER)
    if launcher is None or not launcher.is_alive():
        # Loaded here: only the end of a killed `serve` needs it, and every list would wait for it.
        from lachesis.supervision.leftovers import find_launcher_leftovers

        for leftover in find_launcher_leftovers(paths.home()):  # It was killed.
            leftover.clean_up()
        return server_info
    launcher.send_signal(signal.SIGTERM)
    if not wait_until(lambda: not launcher.is_alive(), timeout_s):
        raise RunStateError(
            f"the launcher (process {launcher.pid}) has not ended after {timeout_s:.0f} s; "
            "its runs may still be saving checkpoints"
        )
    return server_info


class LauncherProcess:
    """Run a launcher during a block; it ends even if this process is killed."""

    def __init__(self, timeout_s: float = START_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s

    def __enter__(self) -> Self:
        self._launcher = _make_launcher(ends_with_parent=True)
        _start_launcher(self._launcher, self.timeout_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._launcher.end(STOP_TIMEOUT_S)


def require_other_server(url: str, port: int | None) -> None:
    """Check the server that $PREFECT_API_URL names.

    Args:
        url: The value of that variable.
        port: The port that was requested for a server of this home, if any.

    Raises:
        ConfigError: A port was given for a server that is not started.
        ServerDownError: The server does not respond.
    """
    if port is not None:
        raise ConfigError(
            f"--port is {port}, but PREFECT_API_URL names the server {url}, so no server is "
            "started here; leave out --port, or unset PREFECT_API_URL"
        )
    try:
        PrefectApi(url).require_healthy()
    except ServerDownError as error:
        if isinstance(error.__cause__, httpx.HTTPError):
            reason = f"it does not respond ({type(error.__cause__).__name__})"
        else:
            reason = str(error)
        raise ServerDownError(
            f"the Prefect server {url}, which PREFECT_API_URL names, cannot be used: {reason}; "
            "start that server, or unset PREFECT_API_URL to have one started here"
        ) from error
