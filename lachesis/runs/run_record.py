"""The record of a run: what was asked for, its state, and its services."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lachesis.base.host_clock import ClockReading, is_same_boot, read_clocks
from lachesis.base.timestamps import IsoTime, iso_to_unix_s, now_iso, seconds_between

RunStatusName = Literal[
    "pending", "starting", "running", "stopping", "stopped", "completed", "failed"
]
END_STATUSES: frozenset[str] = frozenset({"stopped", "completed", "failed"})


class ServiceRecord(BaseModel):
    """One process of a run. `state` is "pending", "starting", "running" or "exited (CODE)"; a
    negative code is the signal that ended it.
    """

    pid: int | None = None
    port: int | None = None
    log: str
    state: str = "pending"


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


def mark_services_exited(services: Mapping[str, ServiceRecord]) -> dict[str, ServiceRecord]:
    """Of a run that has ended; how those ended that nobody saw is not known."""
    unknown_exit = {"state": "exited (unknown)"}
    return {
        name: service
        if service.state.startswith("exited")
        else service.model_copy(update=unknown_exit)
        for name, service in services.items()
    }


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
