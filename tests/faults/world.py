"""A real home with a launcher, and real runs in it, to break."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from lachesis.base.errors import LachesisError
from lachesis.base.managed_process import ProcessIdentity
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.launch_spec import LaunchSpec
from lachesis.operations.launches import start_run
from lachesis.operations.runs import get_run, resume_run, stop_run
from lachesis.prefect_client.serve_info import read_processes, server_file
from lachesis.runs.folder import RunDir
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.supervision import leftovers
from lachesis.supervision.restarts import RESTART_RULES
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.tiny_model import build
from tests.patience import deadline
from tests.served import ROOT, processes_under

INTERVAL = 2
"""Steps between two checkpoints."""
EDITS: dict[str, Any] = {
    "batch_size": 8, "group_size": 4, "total_steps": 5000, "max_token_length": 32,
    "save_checkpoint_interval": INTERVAL, "use_wandb": False, "final_evaluation": False,
}  # fmt: skip
KEY = "sk-marked-5b1f7a9c3e"
"""Stands for every key of the user; no file, argument, log or artifact may ever show it."""
Phase = str


class World:
    """One home. `serve` starts a launcher when none runs."""

    KEY = KEY

    def __init__(self, home: Path) -> None:
        self.home = home
        self.model = str(build.get_tiny_model_path(build.TinyModelRecipe(), home))
        self.launcher: subprocess.Popen[bytes] | None = None
        self.port = reserve_free_ports(1)[0]
        self.current: Run | None = None
        """One that trains, left by the case before; starting one takes longer than most faults."""
        self.restarts = 0
        """Counts those of server and runner by this launcher, which pauses longer each time."""
        self.store = RunStore(home)

    # --- the launcher

    def env(self) -> dict[str, str]:
        own = {
            "LACHESIS_HOME": str(self.home),
            "LACHESIS_ENVIRONMENTS": str(Path(__file__).parent),
            "LACHESIS_MONITOR_INTERVAL_S": "3600",
            "OMP_NUM_THREADS": "1",
            "TINKER_API_KEY": f"tml-{KEY}",
            "WANDB_API_KEY": KEY,
            "WANDB_MODE": "offline",
            "OPENAI_API_KEY": KEY,
            "HF_TOKEN": KEY,
        }
        return {**os.environ, **own}

    def serve(self, *before: str, **env: str) -> None:
        if self.launcher is not None and self.launcher.poll() is None and self.restarts < 3:
            self.wait(self._is_whole, 90, "server and runner to be there again", poll_s=0.5)
            return
        self.stop_serving()
        server_file(self.home).unlink(missing_ok=True)
        command = [*before, sys.executable, "-m", "deployments.serve", "--port", str(self.port)]
        with (self.home / "launcher.log").open("ab") as log:
            self.launcher = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self.env(), **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.wait(lambda: server_file(self.home).exists(), 90, "the launcher to be ready")

    def _is_whole(self) -> bool:
        pids = {identity.pid for identity in self._identities().values()}
        url = f"http://127.0.0.1:{self.port}/api/health"
        with contextlib.suppress(httpx.HTTPError):
            return pids <= set(self.processes()) and httpx.get(url, trust_env=False).is_success
        return False

    def part(self, name: str) -> int:
        """The process id of `server` or `runner`."""
        return self._identities()[name].pid

    def _identities(self) -> dict[str, ProcessIdentity]:
        return read_processes(json.loads(server_file(self.home).read_text()))

    def stop_serving(self) -> None:
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGTERM)
            self.launcher.wait(600)
        self.launcher, self.restarts = None, 0

    # --- runs

    def start(self, *, from_checkpoint: str | None = None, **edits: Any) -> Run:
        spec = LaunchSpec(
            environment="steady",
            settings={**EDITS, **edits},
            model=self.model,
            seed=0,
            from_checkpoint=from_checkpoint,
        )
        record = start_run(self.store, spec)
        return Run(self, record.run_id)

    def take(self, phase: Phase, part: str = "") -> Run:
        """A run for a case that begins in this phase; who leaves it training gives it back as
        `current`. One whose next death of this part would be one too many is not taken.
        """
        run, self.current = self.current, None
        if run is not None and (
            phase == "starting" or run.seen().status != "running" or run.used_up(part)
        ):
            run.stop(now=True)
            run = None
        return run or self.start()

    def wait(
        self, condition: Callable[[], Any], timeout_s: float, what: str, poll_s: float = 0.05
    ) -> Any:
        until = deadline(timeout_s)
        while not (value := condition()):
            if (
                self.launcher is not None
                and self.launcher.poll() is not None
                and "launcher" in what
            ):
                raise AssertionError((self.home / "launcher.log").read_text()[-3000:])
            assert time.monotonic() < until, f"{what} has not happened in {timeout_s:.0f} s"
            time.sleep(poll_s)
        return value

    def strike(self, pid: int, number: signal.Signals) -> None:
        """Send the signal, but never to a process that is not of this home."""
        assert pid in self.processes(), f"{pid} is not ours"
        os.kill(pid, number)

    def fix(self) -> list[str]:
        """What `lachesis doctor --fix` does."""
        return [
            find_all_leftover.clean_up()
            for find_all_leftover in leftovers.find_all_leftovers(self.store)
        ]

    def end_all_runs(self) -> None:
        """All but the current one."""
        for record in self.store.all():
            run = Run(self, record.run_id)
            if run.dir.is_alive() and (self.current is None or run.run_id != self.current.run_id):
                with contextlib.suppress(LachesisError, AssertionError):
                    run.stop(now=True)

    def processes(self, place: Path | None = None) -> dict[int, str]:
        """Every living process that has this home, or a folder in it, in its environment, its
        command or as its own folder.
        """
        return processes_under(place or self.home)


class Run:
    """A run of the world, seen from outside."""

    def __init__(self, world: World, run_id: str) -> None:
        self.world, self.run_id = world, run_id
        self.dir: RunDir = world.store.dir(run_id)
        self.struck: collections.Counter[str] = collections.Counter()
        """How often each part was made to die, in all attempts."""

    @property
    def record(self) -> RunRecord:
        return self.world.store.load(self.run_id)

    def seen(self) -> RunRecord:
        """As `lachesis status` sees it."""
        return get_run(self.world.store, self.run_id)

    def pid(self, part: str) -> int:
        if part == "reaper":
            return next(
                pid
                for pid, command in self.world.processes(self.dir.path).items()
                if "reaper.py" in command
            )
        pid = self.record.flow_pid if part == "flow" else self.record.services[part].pid
        assert pid is not None
        return pid

    def steps(self) -> list[int]:
        return (
            [int(step["step"]) for step in MetricsFile(self.dir.metrics).read()]
            if self.dir.metrics.exists()
            else []
        )

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.dir.checkpoints)

    def kept(self) -> int:
        """The step of the newest whole checkpoint, each of its files verified."""
        newest = self.checkpoints().find_resumable()
        return newest.step if newest else 0

    def health(self) -> dict[str, Any]:
        port = self.record.services["trainer"].port
        try:
            return dict(
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=2, trust_env=False).json()
            )
        except (httpx.HTTPError, ValueError):
            return {}

    def reach(self, phase: Phase, part: str = "engine") -> None:
        """Wait until the run is in this phase: the part is starting, the run trains, or the trainer
        saves a checkpoint.
        """
        wait = self.world.wait
        if phase == "starting":
            name = part if part in ("engine", "api", "trainer", "environment") else "engine"
            wait(
                lambda: (
                    (service := self.record.services.get(name))
                    and service.pid
                    and service.state == "starting"
                ),
                120,
                f"start of {name}",
            )
            return
        wait(lambda: len(self.steps()) > INTERVAL and self.kept(), 150, "a step after a checkpoint")
        if phase == "checkpointing":
            wait(
                lambda: self.health().get("waiting_for") == "checkpoint",
                60,
                "a checkpoint under way",
                poll_s=0.001,
            )

    def used_up(self, part: str) -> bool:
        """Whether the part has been started again as often as the policy allows."""
        return (
            part in RESTART_RULES
            and bool(RESTART_RULES[part].pauses_s)
            and self.struck[part] >= len(RESTART_RULES[part].pauses_s)
        )

    def advances(self, count: int = 3, timeout_s: float = 120) -> None:
        before = self.steps()[-1] if self.steps() else 0
        self.world.wait(
            lambda: (self.steps() or [0])[-1] >= before + count,
            timeout_s,
            f"{count} steps after step {before}",
        )

    def ended(self, timeout_s: float = 120) -> RunRecord:
        """Wait for an end, in the record and in the eyes of a user, and for the end of every
        process.
        """
        self.world.wait(lambda: self.seen().has_ended, timeout_s, "the end of the run", poll_s=0.2)
        self.gone()
        return self.record

    def gone(self, timeout_s: float = 60) -> None:
        wait, folder = self.world.wait, self.dir.path
        wait(
            lambda: not self.world.processes(folder) and not self.dir.is_alive(),
            timeout_s,
            "the end of every process",
            0.2,
        )

    def stop(self, *, now: bool = False) -> RunRecord:
        stop_run(self.world.store, self.run_id, now=now)
        return self.ended()

    def resume(self) -> None:
        """As a user would, and it trains."""
        kept = self.kept()
        resume_run(self.world.store, self.run_id)
        if kept:
            self.world.wait(lambda: self.record.resumed, 150, "the receipt")
            receipt = self.record.resumed or {}
            assert receipt["step"] == kept
            assert abs(receipt["loss_change"]) < 1e-3
        self.advances(1, 150)


@contextlib.contextmanager
def frozen(pid: int, seconds: float) -> Iterator[None]:
    """The process stands still for so long, whatever happens in the block, which it outlasts."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + seconds
    try:
        yield
        time.sleep(max(0.0, until - time.monotonic()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def stranger_with_the_numbers_of(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else, whose number the run's record then holds for each of its own."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        services = {
            name: service.model_copy(update={"pid": stranger.pid})
            for name, service in run.record.services.items()
        }
        run.world.store.update(run.run_id, flow_pid=stranger.pid, services=services)
        try:
            yield stranger
        finally:
            stranger.kill()
