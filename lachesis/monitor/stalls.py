"""What a run is waiting for, since when, and whether that is too long. Pure functions on one look.

The part that is named is the one that has to move next: environment, sampler, API queue, rollouts, forward_backward,
optim_step, checkpoint, or a process that does not answer. A run that waits for an evaluation after
its last step has not stalled: the trainer itself limits that wait."""

from __future__ import annotations

import statistics
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict

from lachesis.monitor.observe import Json, Look
from lachesis.supervision.process import get_service_role

FROZEN = ("stopped", "tracing-stop")
TIMES = {"rollouts": "time/rollouts", "forward_backward": "time/forward_backward", "optim_step": "time/optim_step",
         "sampler": "time/publish", "checkpoint": "time/checkpoint"}  # fmt: skip
USUAL = 5.0
"""A phase may take so many times its usual length before it counts as a stall."""
SERVICES = {"trainer": "the inference server", "api": "the Atropos API", "engine": "the engine"}


class Stall(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    part: str
    """The part that is waited for."""
    since: str
    """UTC, ISO 8601: its last sign of life."""
    evidence: str


def find_stall(look: Look, silent_since: dict[str, float], *, clock_was_set: bool = False) -> Stall | None:
    """The stall of a run that trains, or None. `silent_since` says since when a service has not answered, by earlier looks.
    After somebody has set the time, times from before it say nothing."""
    if look.record.status != "running" or look.record.phase != "training":
        return None
    frozen = _frozen(look, silent_since)
    return frozen if frozen or clock_was_set else _silent(look, silent_since) or _waiting(look)


def _frozen(look: Look, silent_since: dict[str, float]) -> Stall | None:
    """A process that somebody or something has stopped; it needs no patience to be sure."""
    order = ("environment", "trainer", "api", "engine", "flow")
    frozen = [name for one in order for name, state in look.states.items() if get_service_role(name) == one and state in FROZEN]
    if not frozen:
        return None
    first = frozen[0]
    since = (look.tally or {}).get("at") if get_service_role(first) == "environment" else silent_since.get(first)
    known = {"flow": look.record.flow_pid} | {name: service.pid for name, service in look.record.services.items()}
    pids = ", ".join(f"{name} (pid {known[name]})" for name in frozen)
    go_on = f"`kill -CONT {' '.join(str(known[name]) for name in frozen)}` lets it go on"
    return _stall(first, since or look.at, f"stopped by a signal: {pids}; {go_on}")


def _silent(look: Look, silent_since: dict[str, float]) -> Stall | None:
    for name, words in SERVICES.items():
        since = silent_since.get(name)
        if since is not None and look.at - since >= look.limits.stall_after_s:
            return _stall(name, since, f"{words} has not answered for {look.at - since:.0f} s")
    return None


def _waiting(look: Look) -> Stall | None:
    trainer = look.trainer or {}
    what, since = trainer.get("waiting_for"), trainer.get("since")
    if what not in TIMES or not isinstance(since, int | float) or look.at - since < look.limits.stall_after_s:
        return None
    waited = f"no batch for {look.at - since:.0f} s"
    if what == "rollouts" and look.tally and look.at - look.tally["at"] > look.limits.stall_after_s:
        quiet = look.at - look.tally["at"]  # it beats every two seconds, whatever it waits for
        return _stall("environment", look.tally["at"], f"{waited}; its process gives no sign of life since {quiet:.0f} s")
    if look.at - since < _patience(look, what):
        return None
    if what == "rollouts":
        return _behind_rollouts(look, since, waited)
    where = " of the engine" if look.engine is not None else " of the Tinker server"
    asked = {
        "forward_backward": "the answer",
        "optim_step": "the answer",
        "sampler": "new sampling weights",
        "checkpoint": "a save",
    }
    return _stall(what, since, f"the trainer waits for {asked[what]}{where} since {look.at - since:.0f} s")


def _patience(look: Look, what: str) -> float:
    """Before there is a usual length, a first batch of long answers may take its time."""
    usual = [one[TIMES[what]] for one in look.steps if one.get(TIMES[what])]
    return max(look.limits.stall_after_s, USUAL * (statistics.median(usual) if usual else look.limits.stall_after_s))


def _behind_rollouts(look: Look, since: float, waited: str) -> Stall:
    """The trainer waits for a batch; who keeps it waiting."""
    counted, most = look.tally, _patience(look, "rollouts")
    if counted is None:
        return _stall("environment", since, f"{waited}; the environment has not told anything of itself")
    for kind, part, words in (
        ("request", "sampler", "{n} requests for samples are unanswered, the oldest for {age:.0f} s"),
        ("item", "environment", "get_next_item() has not returned for {age:.0f} s"),
        (
            "group",
            "environment",
            "{n} groups are under way and ask for no samples, the oldest for {age:.0f} s: its score does not end",
        ),
    ):
        begun = counted.get(f"{kind}_since")
        if begun and look.at - begun > most:
            told = words.format(n=counted.get(f"in_{kind}", 0), age=look.at - begun)
            return _stall(part, begun, f"{waited}; {told}")
    return _without_groups(look, counted, since, waited, most)


def _without_groups(look: Look, counted: Json, since: float, waited: str, most: float) -> Stall:
    last, api = counted.get("group_at"), look.api or {}
    if api.get("refused"):
        return _stall("API queue", since, f"{waited}; the API has refused {api['refused']} groups: {api.get('refusal')}")
    if not last or look.at - last > most:
        errors = "; ".join(f"{text} ({count} times)" for text, count in (counted.get("errors") or {}).items())
        said = errors or f"{counted.get('empty', 0)} groups were empty"
        return _stall("environment", last or since, f"{waited}; the environment gives no usable group: {said}")
    if turn := api.get("turn"):
        return _stall("environment", last, f"{waited}; it is the turn of {turn}, whose share no other environment may fill")
    queued = {**(api.get("buffered") or {}), **(api.get("queued") or {})}
    if queued:
        told = ", ".join(f"{count} of {size}" for size, count in queued.items())
        needs = f"a batch takes exactly {api.get('batch_size')} rollouts of whole groups"
        return _stall("API queue", since, f"{waited}; the groups that wait ({told} rollouts) do not fill one: {needs}")
    dropped = counted.get("dropped") or 0
    why = f"; {dropped:.0f} rollouts were dropped for their length, size or equal scores" if dropped else ""
    return _stall("rollouts", since, f"{waited}, while the environment makes groups{why}")


def _stall(part: str, since: float, evidence: str) -> Stall:
    return Stall(part=part, since=datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds"), evidence=evidence)
