"""A home that `lachesis serve` serves, what people and agents do in it, and its processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from lachesis.base.managed_process import ProcessIdentity
from lachesis.prefect_client.serve_info import read_processes, server_file
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.supervision.services.ports import reserve_free_ports
from tests.harness.openai_endpoint import Endpoint
from tests.harness.processes import ROOT
from tests.harness.waiting import call_again, wait_until

CLI = (sys.executable, "-P", "-m", "lachesis.cli.main")


class ServedHome:
    """A home of its own; `serve` starts a launcher where none runs.

    Args:
        home: The folder of the home.
        prefix: The words before each command, for a home on a host of its own.
        **env: Further variables of every command.
    """

    def __init__(self, home: Path, prefix: Sequence[str] = (), **env: str) -> None:
        self.home, self.prefix = home, prefix
        self.port = reserve_free_ports(1)[0]
        self.launcher: subprocess.Popen[bytes] | None = None
        self.store = RunStore(home)
        self.own_env = {
            "LACHESIS_HOME": str(home),
            "LACHESIS_MONITOR_INTERVAL_S": "3600",  # the tests ask for ticks themselves
            **env,
        }

    def env(self) -> dict[str, str]:
        """Return the variables of a command in this home."""
        return {**os.environ, **self.own_env}

    def serve(self, *before: str, **env: str) -> None:
        """Start a launcher and wait until it is ready; `before` are words before its command."""
        server_file(self.home).unlink(missing_ok=True)
        words = (*self.prefix, *before, sys.executable, "-m", "deployments.serve")
        self.launcher = self.popen([*words, "--port", str(self.port)], "launcher.log", **env)
        ready = server_file(self.home).exists
        log = self.home / "launcher.log"
        wait_until(ready, 120, "the launcher to be ready", process=self.launcher, log=log)

    def popen(self, command: Sequence[str], log: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own, with a log in the home."""
        with (self.home / log).open("ab") as stream:
            return subprocess.Popen(
                command, cwd=ROOT, env={**self.env(), **env}, stdout=stream, stderr=stream,
                start_new_session=True,
            )  # fmt: skip

    def stop_serving(self) -> None:
        """Tell the launcher to end, and wait for its end."""
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGTERM)
            code = self.launcher.wait(600)
            assert code == 0, (self.home / "launcher.log").read_text()[-3000:]
        self.launcher = None

    @contextlib.contextmanager
    def served(self, **env: str) -> Iterator[Path]:
        """Serve the home within the block, which may leave no process."""
        self.serve(**env)
        try:
            yield self.home
        finally:
            self.stop_serving()
        left = self.processes()
        assert left == {}, left

    # --- what people and agents do

    def try_cli(self, *words: str, timeout: float = 600, **env: str) -> tuple[int, Any]:
        """Run `lachesis ... --json` and return its exit code and its answer, or its error."""
        done = subprocess.run(
            [*self.prefix, *CLI, *words, "--json"],
            env={**self.env(), **env}, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def cli(self, *words: str, expect: int = 0, timeout: float = 280, **env: str) -> Any:
        """Run `lachesis ... --json` and return its answer; `expect` is the exit code."""
        code, answer = self.try_cli(*words, timeout=timeout, **env)
        assert code == expect, answer
        return answer

    def agent(self, transport: str, tool: str, place: dict[str, str], /, **arguments: Any) -> Any:
        """Return the answer of a tool, asked by a process that is killed afterwards (`agent`)."""
        agent = [sys.executable, str(Path(__file__).with_name("agent.py")), transport, tool]
        done = subprocess.run(
            [*agent, json.dumps(arguments)],
            env={**self.env(), **place, "LACHESIS_SESSION": f"agent-{transport}"},
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        assert "code" not in answer, answer
        return answer

    @contextlib.contextmanager
    def serve_surfaces(self) -> Iterator[dict[str, dict[str, str]]]:
        """Run `lachesis mcp --http` and `lachesis api`, and yield the address and the token that an
        agent needs for each, by transport.
        """
        with contextlib.ExitStack() as ends:
            urls = {}
            for name, words, port in zip(
                ("mcp", "api"), (["mcp", "--http"], ["api"]), reserve_free_ports(2), strict=True
            ):
                command = [*CLI, *words, "--port", str(port)]
                process = self.popen(command, f"{name}.log")
                ends.callback(process.wait, 10)
                ends.callback(process.terminate)
                urls[name] = f"http://127.0.0.1:{port}"
                call_again(
                    lambda url=urls[name]: httpx.get(f"{url}/health", trust_env=False),
                    httpx.HTTPError,
                    process=process,
                )
            token = (self.home / "token").read_text()
            yield {
                "mcp-http": {"URL": urls["mcp"], "TOKEN": token},
                "http": {"URL": urls["api"], "TOKEN": token},
            }

    # --- runs

    def load(self, run_id: str) -> RunRecord:
        """Return the record of a run."""
        return self.store.load(run_id)

    def wait_for_run(
        self, run_id: str, is_reached: Callable[[RunRecord], bool], timeout_s: float
    ) -> RunRecord:
        """Wait for something about a run; its end is the last chance."""

        def reached() -> RunRecord | None:
            record = self.load(run_id)
            assert is_reached(record) or not record.has_ended, record.error
            return record if is_reached(record) else None

        record = wait_until(reached, timeout_s, lambda: self.load(run_id), poll_s=0.2)
        assert record
        return record

    def wait_until_ended(self, run_id: str, timeout_s: float = 500) -> RunRecord:
        """Wait for the end of a run in its record."""
        return self.wait_for_run(run_id, lambda record: record.has_ended, timeout_s)

    # --- processes

    def wait(
        self, condition: Callable[[], Any], timeout_s: float, what: str, poll_s: float = 0.05
    ) -> Any:
        """Wait under a deadline; where `what` names the launcher, its end is the last chance."""
        launcher = self.launcher if "launcher" in what else None
        log = self.home / "launcher.log"
        return wait_until(condition, timeout_s, what, poll_s=poll_s, process=launcher, log=log)

    def part(self, name: str) -> int:
        """Return the process id of `server` or `runner`."""
        return self.identities()[name].pid

    def identities(self) -> dict[str, ProcessIdentity]:
        """Return the processes that the launcher has started, by name."""
        return read_processes(json.loads(server_file(self.home).read_text()))

    def processes(self, place: Path | None = None) -> dict[int, str]:
        """Return the processes of this home, or of a folder in it; see `processes_under`."""
        return processes_under(place or self.home)

    def strike(self, pid: int, number: signal.Signals) -> None:
        """Send the signal, but never to a process that is not of this home."""
        assert pid in self.processes(), f"{pid} is not ours"
        os.kill(pid, number)


def make_serve_env(endpoint: Endpoint) -> dict[str, str]:
    """Return the variables of a `serve` that has this endpoint, and three places for runs."""
    return {
        "LACHESIS_MAX_RUNS": "3",
        "LACHESIS_NIGHTLY_ENVIRONMENTS": "arithmetic format_json",
        "OPENAI_BASE_URL": endpoint.url,
        "OPENAI_API_KEY": endpoint.key,
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
    }


def processes_under(home: Path) -> dict[int, str]:
    """Return every living process that has this folder in its environment, in its command or as
    its own folder, and its command.
    """
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            text = (
                (folder / "environ").read_bytes() + command + os.readlink(folder / "cwd").encode()
            )
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if str(home).encode() in text and state != "Z" and int(folder.name) != os.getpid():
                commands[int(folder.name)] = command.replace(b"\0", b" ").decode()
    return commands
