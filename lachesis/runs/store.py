"""Runs on disk: one folder each, with a record that is replaced as a whole.

runs/{run_id}/run.json  config.yaml  metrics.jsonl  checkpoints/  logs/  engine/  evaluation/
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from lachesis.base import paths
from lachesis.base.errors import RunStateError, StorageError, UnknownRunError, shorten
from lachesis.base.files import open_owner_only, storage_errors, write_private
from lachesis.base.host_clock import ClockReading, is_same_boot, read_clocks

RunStatusName = Literal[
    "pending", "starting", "running", "stopping", "stopped", "completed", "failed"
]
END_STATUSES: frozenset[str] = frozenset({"stopped", "completed", "failed"})

LOCK_S = 10.0
"""A record is written in milliseconds; who holds it longer has been stopped."""


class ServiceRecord(BaseModel):
    """One process of a run. `state` is "pending", "starting", "running" or "exited (CODE)"; a
    negative code is the signal that ended it.
    """

    pid: int | None = None
    port: int | None = None
    log: str
    state: str = "pending"


def _require_time_zone(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


IsoTime = Annotated[str, AfterValidator(_require_time_zone)]


class AdditionalEnvironment(BaseModel):
    """An environment beside the run's first one."""

    environment_file: str
    fingerprint: str


class RunRecord(BaseModel):
    """What is known about a run. Times are UTC, ISO 8601."""

    model_config = ConfigDict(protected_namespaces=())

    run_id: str
    environment: str
    environment_file: str
    profile: str
    base_model: str
    total_steps: int = Field(ge=1)
    batch_size: int = 0
    seed: int
    fingerprint: str = ""
    """Of the environment's code at the start; see `lachesis.catalog.fingerprint`."""
    mixture: dict[str, AdditionalEnvironment] = {}
    """The run's further environments, by name."""
    forecast: dict[str, Any] | None = None
    """What a validation of the same code expected of this run."""
    require_validation: bool = False
    forked_from: str | None = None
    """RUN@STEP of the checkpoint that it has begun from."""
    status: RunStatusName = "pending"
    phase: str = "queued"
    error: str | None = None
    stop_reason: str | None = None
    """Why somebody or something asked the run to end, before it does."""
    resume_wanted: bool = False
    """Whether the monitor goes on with it once it has ended."""
    auto_resumes: int = 0
    failed_service: str | None = None
    """The process whose death ended the run."""
    health: dict[str, Any] | None = None
    """What the monitor said of it last; None before it has looked."""
    created_at: IsoTime = Field(default_factory=lambda: now_iso())
    queued_at: IsoTime = Field(default_factory=lambda: now_iso())
    """When it was submitted last; a resumed run stands at the end of the queue."""
    started_at: IsoTime | None = None
    earlier_hours: float = 0.0
    """Hours that attempts before this one took."""
    healthy_at: IsoTime | None = None
    ended_at: IsoTime | None = None
    began_s: float | None = None
    """The host's monotonic clock when this attempt began; who sets the time does not move it."""
    boot: str | None = None
    """The boot of the host that `began_s` belongs to; None in records of the release before."""
    took_s: float | None = None
    """Seconds that this attempt took, once it has ended."""
    attempt: int = 1
    wandb_project: str
    wandb_run_name: str
    resumed: dict[str, Any] | None = None
    """What this attempt went on from; see `lachesis.trainer.checkpoint_manager.Receipt`. None for
    the first one.
    """
    wandb_url: str | None = None
    wandb_error: str | None = None
    """Why logging to W&B has stopped, if it has."""
    prefect_api_url: str | None = None
    flow_run_id: str | None = None
    flow_pid: int | None = None
    services: dict[str, ServiceRecord] = {}
    dead_environments: dict[str, str] = {}
    """What is wrong with environments whose groups were all invalid in this attempt, by name."""
    evaluation: dict[str, dict[str, float]] = {}
    """Held-out metrics of the environment, before and after training."""

    @property
    def has_ended(self) -> bool:
        return self.status in END_STATUSES

    @property
    def attempt_start_unix_s(self) -> float:
        """When this attempt began, or while it waits when it was queued, in seconds since 1970."""
        return iso_to_unix_s(self.started_at or self.queued_at)

    @property
    def learning(self) -> str:
        """The word of the last judgement of learning; without one `too early`, or `unknown` once
        the run has ended.
        """
        word = (self.health or {}).get("word")
        return str(word) if word else "unknown" if self.has_ended else "too early"

    @property
    def evidence(self) -> str | None:
        """The first evidence of that judgement."""
        evidence = (self.health or {}).get("evidence")
        return str(evidence[0]) if isinstance(evidence, list) and evidence else None

    @property
    def environment_files(self) -> dict[str, str]:
        """Of all environments of the run, by name, the first one first."""
        return {
            self.environment: self.environment_file,
            **{name: environment.environment_file for name, environment in self.mixture.items()},
        }


class RunDir:
    """The paths of one run."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.path = root / run_id
        self.record = self.path / "run.json"
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.engine = self.path / "engine"
        self.logs = self.path / "logs"
        self.evaluation = self.path / "evaluation"
        self.failed_evaluations = self.evaluation / "failed.jsonl"
        """Why evaluations during training failed, a line each."""
        self.rollouts = self.path / "rollouts.jsonl"
        self.lock = self.path / ".alive"
        """Locked while a flow or a service of the run lives."""
        self.stop_now_file = self.path / ".now"
        """While it is there, processes of the run that shall end are given no time to do so."""
        self.tinker_session = self.path / "session.json"
        """The Tinker session of the run, while it is open at a server of somebody else."""
        self.spent = self.path / "spent.json"
        """Tokens and money of the run until its trainer ended; the last line of the metrics is
        older.
        """

    def get_counters_file(self, service: str) -> Path:
        """What the process of an environment counts about itself; see
        `lachesis.env_process.counters`.
        """
        return self.path / f"{service}.json"

    def get_position_file(self, service: str) -> Path:
        """Where an environment stands in its items; see `lachesis.env_process.dataset_position`."""
        return self.path / f"cursor{service.removeprefix('environment')}.txt"

    @property
    def counters_files(self) -> list[Path]:
        """Of all environments of the run that have begun to count."""
        return sorted(self.path.glob("environment*.json"))

    def get_log_file(self, service: str) -> Path:
        return self.logs / f"{shorten_service_name(service)}_{self.path.name}.log"

    @contextlib.contextmanager
    def hold_alive_lock(self, timeout_s: float = 60.0) -> Iterator[int]:
        """Hold the run: while the yielded file descriptor is open here, or in a child that was
        given it, the run lives. One flow at a time; a resumed one waits until the last services of
        its predecessor are gone. Raises RunStateError.
        """
        deadline = time.monotonic() + timeout_s
        with storage_errors(self.path), open(self.lock, "w", opener=open_owner_only) as lock:
            while not _try_lock(lock):
                if time.monotonic() > deadline:
                    raise RunStateError(
                        f"run {self.path.name} is still held by another flow after {timeout_s:.0f} s"
                    )
                time.sleep(0.2)
            yield lock.fileno()

    def is_alive(self) -> bool:
        """Return whether a flow or a service of this run exists.

        A process id would not do: the system gives it out again. The lock is tried as a shared one,
        which any number of callers may hold at once, so that they do not take each other for a run.
        """
        try:
            with open(self.lock) as lock:
                return not _try_lock(lock, fcntl.LOCK_SH)
        except OSError:
            return False


class RunStore:
    """All runs under one home. Readers see a record as it was or as it is, never half of it."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or paths.home()
        self.root = paths.runs_dir(self.home)

    def dir(self, run_id: str) -> RunDir:
        return RunDir(self.root, run_id)

    def new_id(self) -> str:
        return secrets.token_hex(4)

    def create(self, record: RunRecord, config_yaml: str = "") -> RunDir:
        """Make the run's folder, its configuration, and last its record. Raises StorageError."""
        run_dir = self.dir(record.run_id)
        with storage_errors(run_dir.path):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (run_dir.path, run_dir.logs, run_dir.checkpoints):
                path.mkdir(mode=0o700, exist_ok=True)
        write_private(run_dir.config, config_yaml)
        write_private(run_dir.record, record.model_dump_json(indent=2))
        return run_dir

    def discard(self, run_id: str) -> None:
        """Remove a run that was never submitted."""
        shutil.rmtree(self.dir(run_id).path, ignore_errors=True)

    def load(self, run_id: str) -> RunRecord:
        """Raises UnknownRunError, which names the runs there are."""
        if not re.fullmatch(r"[0-9a-f]{8}", run_id) or not self.dir(run_id).record.is_file():
            run_ids = [record.run_id for record in self.all()]
            active = [record.run_id for record in self.all() if not record.has_ended]
            raise UnknownRunError(
                f"there is no run {shorten(repr(run_id), 60)}; known: {', '.join(run_ids[:10]) or 'none'} (rl_list_runs or "
                "`lachesis runs` has all)",
                active_runs=active,
            )
        file = self.dir(run_id).record
        with storage_errors(file):
            try:
                return RunRecord.model_validate_json(file.read_bytes())
            except ValidationError as error:
                raise StorageError(
                    f"{file} is damaged ({error.errors()[0]['msg']}); the run's other files are untouched"
                ) from error

    def update(self, run_id: str, *, if_attempt: int | None = None, **changes: Any) -> RunRecord:
        """Change these fields of the record and leave the others as another process may have set
        them meanwhile. With `if_attempt` nothing changes when the run is at another attempt by now.
        """
        with self._lock_record(run_id):
            record = self.load(run_id)
            if if_attempt is not None and record.attempt != if_attempt:
                return record
            record = RunRecord.model_validate({**record.model_dump(), **changes})
            write_private(self.dir(run_id).record, record.model_dump_json(indent=2))
        return record

    def mark_ended(
        self,
        run_id: str,
        status: RunStatusName,
        error: str | None = None,
        *,
        if_attempt: int | None = None,
    ) -> RunRecord:
        """Write how a run ended whose flow can no longer do it: nothing of it lives. An end that
        the flow has written meanwhile stays, and so does another attempt than `if_attempt`.
        """
        with self._lock_record(run_id):
            record = self.load(run_id)
            if record.has_ended or if_attempt not in (None, record.attempt):
                return record
            end_fields: dict[str, Any] = {
                "status": status,
                "phase": status,
                "error": error,
                "ended_at": now_iso(),
            }
            end_fields |= {
                "services": mark_services_exited(record.services),
                "took_s": self._estimate_attempt_s(record),
            }
            record = record.model_copy(update=end_fields)
            write_private(self.dir(run_id).record, record.model_dump_json(indent=2))
        return record

    def _estimate_attempt_s(self, record: RunRecord) -> float:
        """How long an attempt lived whose end nobody saw: until it wrote last; the host may have
        been off since.
        """
        write_times = [0.0]
        for file in (self.dir(record.run_id).metrics, self.dir(record.run_id).record):
            with contextlib.suppress(OSError):
                write_times.append(file.stat().st_mtime)
        started_at = (
            datetime.fromisoformat(record.started_at).timestamp() if record.started_at else 0.0
        )
        return max(0.0, min(get_attempt_duration_s(record), max(write_times) - started_at))

    def update_service(self, run_id: str, name: str, **changes: Any) -> None:
        with self._lock_record(run_id):
            record = self.load(run_id)
            service = record.services.get(name) or ServiceRecord(
                log=str(self.dir(run_id).get_log_file(name))
            )
            record.services[name] = service.model_copy(update=changes)
            write_private(self.dir(run_id).record, record.model_dump_json(indent=2))

    def all(self) -> list[RunRecord]:
        """Every readable run, the newest first."""
        return self.scan()[0]

    def scan(self) -> tuple[list[RunRecord], list[str]]:
        """Every readable run, the newest first, and the names of those whose record cannot be read.
        Raises StorageError.
        """
        records, unreadable = [], []
        with storage_errors(self.root):
            folders = [Path(entry) for entry in os.scandir(self.root)] if self.root.exists() else []
        for folder in folders:
            try:
                record = RunRecord.model_validate_json((folder / "run.json").read_bytes())
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValidationError):
                unreadable.append(folder.name)
                continue
            if record.run_id == folder.name:
                records.append(record)
            else:  # the record of another run
                unreadable.append(folder.name)
        return sorted(records, key=lambda record: record.created_at, reverse=True), unreadable

    @contextlib.contextmanager
    def _lock_record(self, run_id: str) -> Iterator[None]:
        self.load(run_id)
        file = self.dir(run_id).path / ".lock"
        with storage_errors(self.root), open(file, "w", opener=open_owner_only) as lock:
            deadline = time.monotonic() + LOCK_S
            while not _try_lock(lock):
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"{file} has been held by another process for {LOCK_S:g} s; it may be stopped or hang"
                    )
                time.sleep(0.01)
            yield


def mark_services_exited(services: Mapping[str, ServiceRecord]) -> dict[str, ServiceRecord]:
    """Of a run that has ended; how those ended that nobody saw is not known."""
    unknown_exit = {"state": "exited (unknown)"}
    return {
        name: service
        if service.state.startswith("exited")
        else service.model_copy(update=unknown_exit)
        for name, service in services.items()
    }


def _try_lock(file: IO[str], operation: int = fcntl.LOCK_EX) -> bool:
    """Take the lock without waiting; return whether it is held now."""
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def shorten_service_name(service: str) -> str:
    """A service's name in file names and in the keys of a status."""
    role, dash, which = service.partition("-")
    return "env" + dash + which if role == "environment" else service


def now_iso() -> str:
    """Fine enough that what was made one after the other is in that order when it is sorted by its
    time.
    """
    return datetime.now(UTC).isoformat(timespec="microseconds")


def get_attempt_duration_s(record: RunRecord, clocks: ClockReading | None = None) -> float:
    """Return the seconds that the run's attempt has lasted until now, or lasted until its end.

    While the run lives they are counted by the monotonic clock, which nobody sets. After the host
    was started anew that clock means nothing, and the time of day is compared instead. A record of
    the release before does not name its boot: then the longer of the two counts, as a budget must
    not forget hours.

    Args:
        record: The run.
        clocks: What the clocks of this host show; read now when it is None.
    """
    if record.took_s is not None or record.started_at is None:
        return record.took_s or 0.0
    if record.has_ended:
        return max(0.0, seconds_between(record.started_at, record.ended_at))
    clocks = clocks or read_clocks()
    by_calendar = (clocks.now - datetime.fromisoformat(record.started_at)).total_seconds()
    by_clock = -1.0 if record.began_s is None else clocks.monotonic_s - record.began_s
    if record.boot is None:
        return max(0.0, by_clock, by_calendar)
    if by_clock >= 0 and is_same_boot(record.boot, clocks.boot):
        return by_clock
    return max(0.0, by_calendar)


def iso_to_unix_s(moment: str) -> float:
    """Return an ISO time as seconds since 1970."""
    return datetime.fromisoformat(moment).timestamp()


def seconds_between(start: str, end: str | None = None) -> float:
    """Seconds from one ISO time to another, or until now."""
    end_time = datetime.fromisoformat(end) if end else datetime.now(UTC)
    return (end_time - datetime.fromisoformat(start)).total_seconds()
