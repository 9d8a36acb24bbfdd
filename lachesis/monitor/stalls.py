"""Find what a run is waiting for, since when, and whether it has waited too long.

The functions are pure functions of one observation. A stall names the part that has to act next:
environment, sampler, API queue, rollouts, forward_backward, optim_step, checkpoint, or a process
that does not answer. A run that waits for an evaluation after its last step has not stalled: the
trainer limits that wait itself.
"""

import statistics
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict

from lachesis.base.json_text import Json
from lachesis.monitor.observe import Observation
from lachesis.supervision.services.order import START_ORDER, TITLES, get_service_role

STOPPED_STATES = ("stopped", "tracing-stop")
PHASE_TIME_KEYS = {"rollouts": "time/rollouts", "forward_backward": "time/forward_backward",
    "optim_step": "time/optim_step",
         "sampler": "time/publish", "checkpoint": "time/checkpoint"}  # fmt: skip
AWAITED_RESULTS = {
    "forward_backward": "the answer",
    "optim_step": "the answer",
    "sampler": "new sampling weights",
    "checkpoint": "a save",
}
# What an environment waits for, the part that is to blame, and the explanation, by urgency.
WAITING_TEXTS = (
    ("request", "sampler", "{n} requests for samples are unanswered, the oldest for {age:.0f} s"),
    ("item", "environment", "get_next_item() has not returned for {age:.0f} s"),
    (
        "group",
        "environment",
        "{n} groups are in progress and request no samples, the oldest for {age:.0f} s: its "
        "scoring does not end",
    ),
)
# An event loop that is silent for longer is blocked: what its requests wait for is its own answer.
MAX_LOOP_SILENCE_S = 10.0
# Multiple of its usual duration after which a phase counts as stalled.
MAX_PHASE_SLOWDOWN = 5.0
# The services that answer questions about themselves.
ASKED_SERVICES = ("trainer", "api", "engine")


class Stall(BaseModel):
    """A part of a run that has been waited for too long."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    part: str
    """The part that is waited for."""
    since: str
    """Last sign of life of that part, in UTC (ISO 8601)."""
    evidence: str


def find_stall(
    observation: Observation, silent_since: dict[str, float], *, has_clock_changed: bool = False
) -> Stall | None:
    """Return the stall of a training run, or None.

    Args:
        observation: What was observed of the run.
        silent_since: Since when each silent service has not answered, as a Unix time.
        has_clock_changed: Whether the system clock was set recently. Then times from before the
        change are not used.
    """
    if observation.record.status != "running" or observation.record.phase != "training":
        return None
    stopped = _find_stopped_process(observation, silent_since)
    if stopped or has_clock_changed:
        return stopped
    return _find_silent_service(observation, silent_since) or _find_slow_phase(observation)


def _find_stopped_process(observation: Observation, silent_since: dict[str, float]) -> Stall | None:
    """Find a process that was stopped by a signal; this is certain without waiting."""
    role_order = (*reversed(START_ORDER), "flow")
    stopped = [
        name
        for service_role in role_order
        for name, state in observation.process_states.items()
        if get_service_role(name) == service_role and state in STOPPED_STATES
    ]
    if not stopped:
        return None
    first_stopped = stopped[0]
    if get_service_role(first_stopped) == "environment":
        since = (observation.environment_counts or {}).get("written_at")
    else:
        since = silent_since.get(first_stopped)
    pid_by_name = {"flow": observation.record.flow_pid} | {
        name: service.pid for name, service in observation.record.services.items()
    }
    pid_list = ", ".join(f"{name} (pid {pid_by_name[name]})" for name in stopped)
    continue_command = (
        f"`kill -CONT {' '.join(str(pid_by_name[name]) for name in stopped)}` lets it go on"
    )
    return _make_stall(
        first_stopped,
        since or observation.observed_at,
        f"stopped by a signal: {pid_list}; {continue_command}",
    )


def _find_silent_service(observation: Observation, silent_since: dict[str, float]) -> Stall | None:
    """Return the stall of a service that has not answered for too long, or None."""
    for name in ASKED_SERVICES:
        since = silent_since.get(name)
        if since is None:
            continue
        silent_s = observation.observed_at - since
        if silent_s >= observation.limits.stall_after_s:
            evidence = f"{TITLES[name]} has not answered for {silent_s:.0f} s"
            return _make_stall(name, since, evidence)
    return None


def _find_slow_phase(observation: Observation) -> Stall | None:
    """Return the stall of a phase that takes far longer than it usually does, or None."""
    trainer_health = observation.trainer_health or {}
    phase, since = trainer_health.get("waiting_for"), trainer_health.get("since")
    if phase not in PHASE_TIME_KEYS or not isinstance(since, int | float):
        return None
    waited_s = observation.observed_at - since
    if waited_s < observation.limits.stall_after_s:
        return None
    waiting_text = f"no batch for {waited_s:.0f} s"
    counts = observation.environment_counts
    is_wait_usual = waited_s < _compute_patience_s(observation, phase)
    if phase == "rollouts" and counts:
        # The counts are written from the environment's event loop every two seconds.
        silent_s = observation.observed_at - counts["written_at"]
        max_silence_s = observation.limits.stall_after_s if is_wait_usual else MAX_LOOP_SILENCE_S
        if silent_s > max_silence_s:
            return _describe_silent_environment(observation, counts["written_at"], waiting_text)
    if is_wait_usual:
        return None
    if phase == "rollouts":
        return _explain_missing_batch(observation, since, waiting_text)
    server_name = "Tinker server" if observation.is_engine_alive is None else "engine"
    return _make_stall(
        phase,
        since,
        f"the trainer has been waiting for {AWAITED_RESULTS[phase]} of the {server_name} for "
        f"{waited_s:.0f} s",
    )


def _describe_silent_environment(
    observation: Observation, since: float, waiting_text: str
) -> Stall:
    """Return the stall of an environment that shows no sign of life."""
    silent_s = observation.observed_at - since
    if observation.blocked_at is None:
        reason = f"its process has shown no sign of life for {silent_s:.0f} s"
    else:
        reason = (
            f"its event loop has been blocked for {silent_s:.0f} s in {observation.blocked_at}; "
            f"`await asyncio.to_thread(...)` around such a call lets the others go on"
        )
    return _make_stall("environment", since, f"{waiting_text}; {reason}")


def _compute_patience_s(observation: Observation, phase: str) -> float:
    """Return the seconds that a phase may take, more for the first batch of long answers."""
    durations_s = [
        step[PHASE_TIME_KEYS[phase]]
        for step in observation.last_steps
        if step.get(PHASE_TIME_KEYS[phase])
    ]
    return max(
        observation.limits.stall_after_s,
        MAX_PHASE_SLOWDOWN
        * (statistics.median(durations_s) if durations_s else observation.limits.stall_after_s),
    )


def _explain_missing_batch(observation: Observation, since: float, waiting_text: str) -> Stall:
    """Return which part keeps a trainer waiting that waits for a batch."""
    counts = observation.environment_counts
    max_wait_s = _compute_patience_s(observation, "rollouts")
    if counts is None:
        return _make_stall(
            "environment", since, f"{waiting_text}; the environment has not reported anything yet"
        )
    for kind, part, template in WAITING_TEXTS:
        oldest_since = counts.get(f"{kind}_since")
        if oldest_since and observation.observed_at - oldest_since > max_wait_s:
            detail = template.format(
                n=counts.get(f"in_{kind}", 0), age=observation.observed_at - oldest_since
            )
            return _make_stall(part, oldest_since, f"{waiting_text}; {detail}")
    return _explain_missing_groups(observation, counts, since, waiting_text, max_wait_s)


def _explain_missing_groups(
    observation: Observation, counts: Json, since: float, waiting_text: str, max_wait_s: float
) -> Stall:
    """Return the stall of missing groups: refused, used up, unusable, awaited, or unexplained."""
    last_group_at, api_counts = counts.get("last_group_at"), observation.api_counts or {}
    if api_counts.get("refused"):
        return _make_stall(
            "API queue",
            since,
            f"{waiting_text}; the API has refused {api_counts['refused']} groups: "
            f"{api_counts.get('refusal')}",
        )
    is_used_up = counts.get("items_used_up") is not None and not counts.get("in_group")
    if is_used_up or not last_group_at or observation.observed_at - last_group_at > max_wait_s:
        reason = _explain_unusable_groups(counts, is_used_up=is_used_up)
        return _make_stall("environment", last_group_at or since, f"{waiting_text}; {reason}")
    if blocking_environment := api_counts.get("turn"):
        return _make_stall(
            "environment",
            last_group_at,
            f"{waiting_text}; it is the turn of {blocking_environment}, whose share no other "
            f"environment may fill",
        )
    return _explain_unused_groups(counts, api_counts, since, waiting_text)


def _explain_unusable_groups(counts: Json, *, is_used_up: bool) -> str:
    """Return why an environment sends no usable group, in words."""
    if is_used_up:
        return (
            f"its items are used up: get_next_item() returned None after {counts['items_used_up']} "
            "items; return them again from the first one to train on"
        )
    errors = "; ".join(
        f"{text} ({count} times)" for text, count in (counts.get("errors") or {}).items()
    )
    reason = errors or f"{counts.get('empty_groups', 0)} groups were empty"
    return f"the environment returns no usable group: {reason}"


def _explain_unused_groups(
    counts: Json, api_counts: Json, since: float, waiting_text: str
) -> Stall:
    """Explain why groups that an environment makes do not become a batch."""
    queued = {**(api_counts.get("buffered") or {}), **(api_counts.get("queued") or {})}
    if queued:
        queued_text = ", ".join(f"{count} of {group_size}" for group_size, count in queued.items())
        requirement = (
            f"a batch takes exactly {api_counts.get('batch_size')} rollouts of whole groups"
        )
        return _make_stall(
            "API queue",
            since,
            f"{waiting_text}; the groups that wait ({queued_text} rollouts) do not fill one: "
            f"{requirement}",
        )
    text = f"{waiting_text}, while the environment makes groups"
    if dropped := counts.get("dropped_rollouts"):
        text += f"; {dropped:.0f} rollouts were dropped for their length, size or equal scores"
    return _make_stall("rollouts", since, text)


def _make_stall(part: str, since: float, evidence: str) -> Stall:
    return Stall(
        part=part,
        since=datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds"),
        evidence=evidence,
    )
