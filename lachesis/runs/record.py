"""Define the record of a run: the request, its state, and its services."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lachesis.base.timestamps import IsoTime, iso_to_unix_s, now_iso, seconds_between
from lachesis.config.launch_spec import LaunchSpec
from lachesis.runs.end_causes import EndCause
from lachesis.runs.host_clock import ClockReading, is_same_boot, read_clocks

RunStatusName = Literal[
    "pending", "starting", "running", "stopping", "stopped", "completed", "failed"
]
END_STATUSES: frozenset[str] = frozenset({"stopped", "completed", "failed"})


class ServiceRecord(BaseModel):
    """Describe one process of a run.

    `state` is "pending", "starting", "running" or "exited (CODE)"; a negative code is the number of
    the signal that ended it.
    """

    pid: int | None = None
    port: int | None = None
    log: str
    state: str = "pending"


class AdditionalEnvironment(BaseModel):
    """Describe an additional environment of a run."""

    environment_file: str
    fingerprint: str


class PastAttempt(BaseModel):
    """Describe an attempt that has ended, after which the run was resumed."""

    attempt: int
    started_at: IsoTime | None
    duration_s: float
    first_step: int
    last_step: int | None
    """The step of its last judgement; None if it was never judged."""
    status: str
    cause: EndCause | None = None
    reason: str | None
    """Why it ended, if it did not complete."""
    has_been_healthy: bool = False
    """Whether all of its services were ready."""


class RunRecord(BaseModel):
    """Hold the record of a run; times are UTC in ISO 8601."""

    # Programs that read a record again are given the same object.
    model_config = ConfigDict(protected_namespaces=(), frozen=True)

    run_id: str
    spec: LaunchSpec
    """What was asked for at the start; a resume does not change it."""
    name: str | None = None
    """The name that its user gave it, if any."""
    note: str | None = None
    """A remark of its user about it."""
    tags: list[str] = []
    """Words by which its user finds it again."""
    environment: str
    environment_file: str
    profile: str
    base_model: str
    total_steps: int = Field(ge=1)
    batch_size: int = 0
    seed: int
    fingerprint: str = ""
    """Hash of the environment's code at the start; see `lachesis.environment_catalog.fingerprint`.
    """
    additional_environments: dict[str, AdditionalEnvironment] = {}
    """The run's further environments, by name."""
    by_agent: bool = False
    """Whether an agent has started or resumed it."""
    forecast: dict[str, Any] | None = None
    """The forecast of a validation of the same code."""
    require_validation: bool = False
    forked_from: str | None = None
    """RUN@STEP of the checkpoint that the run was started from."""
    starts_from_base: bool = True
    """Whether the first step begins with the base model; otherwise that model is evaluated apart.
    """
    status: RunStatusName = "pending"
    phase: str = "queued"
    error: str | None = None
    stop_cause: EndCause | None = None
    """Why the run was asked to end; set before it ends."""
    stop_reason: str | None = None
    """That cause as a sentence."""
    end_cause: EndCause | None = None
    """Why this attempt has ended; only `lachesis.runs.ending` sets it."""
    is_end_handled: bool = False
    """Whether the monitor has acted on the end, and nothing of it is left to do."""
    resume_requested: bool = False
    """Whether the monitor resumes the run once it has ended."""
    auto_resumes: int = 0
    failed_service: str | None = None
    """The process whose end made the run fail."""
    health: dict[str, Any] | None = None
    """The monitor's last judgement; None before the first."""
    created_at: IsoTime = Field(default_factory=lambda: now_iso())
    queued_at: IsoTime = Field(default_factory=lambda: now_iso())
    """When it was last submitted; a resumed run goes to the end of the queue."""
    started_at: IsoTime | None = None
    earlier_hours: float = 0.0
    """Hours of all earlier attempts."""
    usd_per_hour: float | None = None
    """Price of an hour of the back end's machines; null if its tokens are priced."""
    healthy_at: IsoTime | None = None
    ended_at: IsoTime | None = None
    began_monotonic_s: float | None = None
    """The host's monotonic clock when this attempt began; setting the time does not change it."""
    host_id: str | None = None
    """The host on which this attempt was made; see `lachesis.runs.host_clock`."""
    host_name: str | None = None
    """The name of that host, for a person."""
    boot_id: str | None = None
    """The boot of the host that `began_monotonic_s` belongs to."""
    attempt_duration_s: float | None = None
    """Duration of this attempt in seconds, once it has ended."""
    attempt: int = 1
    past_attempts: list[PastAttempt] = []
    """The attempts before this one."""
    resume_changes: dict[str, Any] = {}
    """The fields that were changed when the run was resumed, as SECTION.FIELD."""
    wandb_project: str
    wandb_run_name: str
    resumed: dict[str, Any] | None = None
    """What this attempt was resumed from; see `lachesis.trainer.checkpoint_saving`. None for the
    first attempt.
    """
    wandb_url: str | None = None
    wandb_error: str | None = None
    """Why logging to W&B has stopped, if it has."""
    prefect_api_url: str | None = None
    flow_run_id: str | None = None
    made_for_flow_run_id: str | None = None
    """The flow run that was started in Prefect and for which this run was made, if one was."""
    schedule: str | None = None
    """The slug of the schedule in Prefect that has started it, if one has."""
    flow_pid: int | None = None
    services: dict[str, ServiceRecord] = {}
    dead_environments: dict[str, str] = {}
    """Environments whose groups were all invalid in this attempt, with the reason, by name."""

    @property
    def set_fields(self) -> dict[str, Any]:
        """Return the configuration fields that the user has set, as SECTION.FIELD."""
        return {**self.spec.list_edits(), **self.resume_changes}

    @property
    def title(self) -> str:
        """Return the name of the run's flow runs in Prefect."""
        return f"{self.name or self.environment}-{self.run_id}"

    @property
    def submission_key(self) -> str:
        """Return the attempt's key, of which Prefect makes one flow run only."""
        return f"{self.run_id}-{self.attempt}"

    @property
    def has_ended(self) -> bool:
        """Return whether the run has stopped, completed or failed."""
        return self.status in END_STATUSES

    @property
    def has_been_healthy(self) -> bool:
        """Return whether all services were ready in this or an earlier attempt."""
        return self.healthy_at is not None or any(
            past.has_been_healthy for past in self.past_attempts
        )

    @property
    def attempt_start_unix_s(self) -> float:
        """Return when this attempt began, or else was queued, in seconds since the epoch."""
        return iso_to_unix_s(self.started_at or self.queued_at)

    @property
    def has_final_judgement(self) -> bool:
        """Return whether the run has ended and was judged since, which is done once."""
        return self.has_ended and bool((self.health or {}).get("final"))

    @property
    def learning(self) -> str:
        """Return the word of the last judgement; without it `too early`, or `unknown` if ended."""
        word = (self.health or {}).get("word")
        if word:
            return str(word)
        if self.has_ended:
            return "unknown"
        return "too early"

    @property
    def evidence(self) -> str | None:
        """Return the first evidence of that judgement; for a skipped run, why it was skipped."""
        if self.end_cause is EndCause.SKIPPED:
            return self.stop_reason
        evidence = (self.health or {}).get("evidence")
        if isinstance(evidence, list) and evidence:
            return str(evidence[0])
        return None

    @property
    def stall(self) -> dict[str, str] | None:
        """Return the part of a living run that stands still, since when, and how that shows.

        The keys are those of `lachesis.monitor.stalls.Stall`. It is the last that the monitor saw.
        """
        stall = (self.health or {}).get("stalled")
        if self.has_ended or not isinstance(stall, dict):
            return None
        return stall

    @property
    def stall_text(self) -> str | None:
        """Return the stall as one line, or None."""
        if self.stall is None:
            return None
        return "stalled in {part} since {since}: {evidence}".format_map(self.stall)

    @property
    def environment_files(self) -> dict[str, str]:
        """Return the files of all environments of the run by name, the first one first."""
        return {
            self.environment: self.environment_file,
            **{
                name: environment.environment_file
                for name, environment in self.additional_environments.items()
            },
        }


def describe_attempt(record: RunRecord) -> PastAttempt:
    """Return the present attempt as one that has ended."""
    reason = record.stop_reason or record.error
    return PastAttempt(
        attempt=record.attempt,
        started_at=record.started_at,
        duration_s=round(get_attempt_duration_s(record), 1),
        first_step=int((record.resumed or {}).get("step") or 0) + 1,
        last_step=(record.health or {}).get("step"),
        status=record.status,
        cause=record.end_cause,
        reason=reason.splitlines()[0] if reason else None,
        has_been_healthy=record.healthy_at is not None,
    )


def mark_services_exited(services: Mapping[str, ServiceRecord]) -> dict[str, ServiceRecord]:
    """Return the services of an ended run; one without an exit code becomes `exited (unknown)`."""
    unknown_exit = {"state": "exited (unknown)"}
    return {
        name: service
        if service.state.startswith("exited")
        else service.model_copy(update=unknown_exit)
        for name, service in services.items()
    }


def describe_service_state(state: str, run_status: str) -> str:
    """Return the state of a service for a person; one that a run has ended in order is `ended`."""
    # The trainer ends by itself, and the others by SIGTERM.
    if run_status in ("completed", "stopped") and state in ("exited (0)", "exited (-15)"):
        return "ended"
    return state


def get_attempt_duration_s(record: RunRecord, clocks: ClockReading | None = None) -> float:
    """Return the seconds that the run's attempt has lasted until now, or lasted until its end.

    While the run is alive they are counted by the monotonic clock, which cannot be set. After a
    reboot that clock means nothing, and the time of day is compared instead.

    Args:
        record: The run.
        clocks: The clocks of this host; by default they are read now.
    """
    if record.attempt_duration_s is not None or record.started_at is None:
        return record.attempt_duration_s or 0.0
    if record.has_ended:
        return max(0.0, seconds_between(record.started_at, record.ended_at))
    clocks = clocks or read_clocks()
    if (
        record.began_monotonic_s is not None
        and is_same_boot(record.boot_id or "", clocks.boot)
        and clocks.monotonic_s >= record.began_monotonic_s
    ):
        return clocks.monotonic_s - record.began_monotonic_s
    started_at = datetime.fromisoformat(record.started_at)
    return max(0.0, (clocks.now - started_at).total_seconds())
