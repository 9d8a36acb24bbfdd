"""A served home whose runs and processes are struck by faults, and a run seen from outside."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from lachesis.base.errors import LachesisError
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.launch_spec import LaunchSpec
from lachesis.operations.launches import start_run
from lachesis.operations.runs import get_run, resume_run, stop_run
from lachesis.runs.folder import RunDir
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.supervision import leftovers
from lachesis.supervision.restarts import RESTART_RULES
from lachesis.tiny_model import build
from tests.harness.served_home import ServedHome

INTERVAL = 2
"""Steps between two checkpoints."""
EDITS: dict[str, Any] = {
    "batch_size": 8, "group_size": 4, "total_steps": 5000, "max_token_length": 32,
    "save_checkpoint_interval": INTERVAL, "use_wandb": False, "final_evaluation": False,
}  # fmt: skip
KEY = "sk-marked-5b1f7a9c3e"
"""Stands for every key of the user; no file, argument, log or artifact may ever show it."""
Phase = str


class StruckHome(ServedHome):
    """A served home whose launcher is used again by the next case, and whose runs are `Run`s."""

    KEY = KEY

    def __init__(self, home: Path, **env: str) -> None:
        own = {
            "LACHESIS_ENVIRONMENTS": str(Path(__file__).parent),
            "OMP_NUM_THREADS": "1",
            "TINKER_API_KEY": f"tml-{KEY}",
            "WANDB_API_KEY": KEY,
            "WANDB_MODE": "offline",
            "OPENAI_API_KEY": KEY,
            "HF_TOKEN": KEY,
        }
        super().__init__(home, **{**own, **env})
        self.model = str(build.get_tiny_model_path(build.TinyModelRecipe(), home))
        self.current: Run | None = None
        """One that trains, left by the case before; starting one takes longer than most faults."""
        self.restarts = 0
        """Counts those of server and runner by this launcher, which pauses longer each time."""

    def serve(self, *before: str, **env: str) -> None:
        """Serve the home where no launcher does, or where it has restarted its parts often."""
        if self.launcher is not None and self.launcher.poll() is None and self.restarts < 3:
            self.wait(self._is_whole, 90, "server and runner to be there again", poll_s=0.5)
            return
        self.stop_serving()
        super().serve(*before, **env)

    def _is_whole(self) -> bool:
        pids = {identity.pid for identity in self.identities().values()}
        url = f"http://127.0.0.1:{self.port}/api/health"
        with contextlib.suppress(httpx.HTTPError):
            return pids <= set(self.processes()) and httpx.get(url, trust_env=False).is_success
        return False

    def stop_serving(self) -> None:
        """End the launcher, however it ends."""
        with contextlib.suppress(AssertionError):
            super().stop_serving()
        self.launcher, self.restarts = None, 0

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


class Run:
    """A run of the home, seen from outside."""

    def __init__(self, home: StruckHome, run_id: str) -> None:
        self.home, self.run_id = home, run_id
        self.dir: RunDir = home.store.dir(run_id)
        self.struck: collections.Counter[str] = collections.Counter()
        """How often each part was made to die, in all attempts."""

    @property
    def record(self) -> RunRecord:
        return self.home.store.load(self.run_id)

    def seen(self) -> RunRecord:
        """As `lachesis status` sees it."""
        return get_run(self.home.store, self.run_id)

    def pid(self, part: str) -> int:
        if part == "reaper":
            return next(
                pid
                for pid, command in self.home.processes(self.dir.path).items()
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
        wait = self.home.wait
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
        self.home.wait(
            lambda: (self.steps() or [0])[-1] >= before + count,
            timeout_s,
            f"{count} steps after step {before}",
        )

    def ended(self, timeout_s: float = 120) -> RunRecord:
        """Wait for an end, in the record and in the eyes of a user, and for the end of every
        process.
        """
        self.home.wait(lambda: self.seen().has_ended, timeout_s, "the end of the run", poll_s=0.2)
        self.gone()
        return self.record

    def gone(self, timeout_s: float = 60) -> None:
        wait, folder = self.home.wait, self.dir.path
        wait(
            lambda: not self.home.processes(folder) and not self.dir.is_alive(),
            timeout_s,
            "the end of every process",
            0.2,
        )

    def stop(self, *, now: bool = False) -> RunRecord:
        stop_run(self.home.store, self.run_id, now=now)
        return self.ended()

    def resume(self) -> None:
        """As a user would, and it trains."""
        kept = self.kept()
        resume_run(self.home.store, self.run_id)
        if kept:
            self.home.wait(lambda: self.record.resumed, 150, "the receipt")
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
        run.home.store.update(run.run_id, flow_pid=stranger.pid, services=services)
        try:
            yield stranger
        finally:
            stranger.kill()
