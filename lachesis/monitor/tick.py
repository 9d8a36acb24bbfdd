"""One tick of the monitor: look at all living runs, judge them, do what their policies say, and publish.

Nothing is remembered in the process: what a tick must know of the one before lies in the run's `monitor.json`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from lachesis.base.errors import ServerDownError
from lachesis.monitor.course import Health
from lachesis.monitor.judgement import health_entry, judge_look
from lachesis.monitor.observe import Look, look_at
from lachesis.monitor.publish import Publisher
from lachesis.monitor.stalls import Stall, find_stall
from lachesis.monitor.watched import Memory, load_memory, save_memory
from lachesis.orchestration import launcher
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.orchestration.resuming import resubmit_run
from lachesis.runs import cleanup, leftovers
from lachesis.runs.budgets import find_exceeded_budget, compute_budget_shares
from lachesis.runs.checkpoints import Checkpoints
from lachesis.runs.store import RunDir, RunRecord, RunStore, seconds_between

log = logging.getLogger("lachesis.monitor")
Json = dict[str, Any]
MOST_RESUMES = 3
"""A run that stalls again and again is stopped in the end."""
AFTER_END_S = 900.0
"""A run that ended is looked after for so long: its last report, and what it may have left behind."""
SET_S = 30.0
"""A clock that moves so far against the monotonic one was set, or the host slept."""
HELD_S = 300.0
"""Longer than the services of a run take to end, the trainer at the cloud among them; who holds it after that is stuck."""


@dataclass
class Watched:
    """One run in one tick."""

    look: Look
    memory: Memory
    health: Health
    stall: Stall | None
    budget: dict[str, float]
    said: list[str] = field(default_factory=list)
    """What was done in this tick, or could not be done."""
    published: bool = False

    @property
    def record(self) -> RunRecord:
        return self.look.record


class Monitor:
    """Of one home."""

    def __init__(self, store: RunStore) -> None:
        self.store = store

    def tick(self) -> list[Watched]:
        """Look, judge, act, publish. A Prefect server that does not answer keeps nothing but publishing from being done, and
        what goes wrong with one run keeps the others from nothing."""
        records, warning = launcher.refresh_runs(self.store, self.store.scan()[0])
        if warning:
            log.warning("%s", warning)
        mine = [record for record in records if self._matters(record)]
        seen = self._all_judged(mine)
        try:
            self._end_leftovers(seen)
        except Exception as error:
            log.warning("what dead runs have left was not ended: %s", error)
        for one in seen:
            try:
                self._act(one)
            except Exception as error:
                one.said.append(f"not done: {error}")
        try:
            Publisher(self.store.home).publish(seen, records)
        except Exception as error:
            log.warning("not everything was published: %s", error)
        for one in seen:
            over = one.record.has_ended and not one.record.resume_wanted and not one.look.folder.is_alive()
            one.memory.final = over and (one.published or one.record.flow_run_id is None)
            self._remember(one)
            for text in one.said:
                log.info("run %s: %s", one.record.run_id, text)
        return seen

    def _all_judged(self, records: list[RunRecord]) -> list[Watched]:
        seen = []
        for look in look_at(self.store, records):
            try:
                seen.append(self._judged(look))
            except Exception:
                log.exception("run %s cannot be judged", look.record.run_id)
        return seen

    def last_report(self, run_id: str) -> None:
        """Judge and publish a run that has just ended, without waiting for the next tick, which looks for what it may have left
        behind. Raises LachesisError."""
        seen = self._judged(look_at(self.store, [self.store.load(run_id)])[0])
        self._write_health(seen)
        with PrefectApi().reuse_connection() as api:
            Publisher(self.store.home).publish_run(api, seen)
        self._remember(seen)

    def _matters(self, record: RunRecord) -> bool:
        if not record.has_ended:
            return record.status != "pending"
        recent = record.ended_at is not None and seconds_between(record.ended_at) < AFTER_END_S
        return record.resume_wanted or (recent and not load_memory(self.store.dir(record.run_id)).final)

    # --- judge ------------------------------------------------------------------------------------------------------

    def _judged(self, look: Look) -> Watched:
        memory = load_memory(look.folder, look.record)
        answers = {"trainer": look.trainer is not None, "api": look.api is not None, "engine": look.engine is not False}
        set_lately = _clock_was_set(memory, look.limits.stall_after_s)
        if look.record.status == "running" and not set_lately:
            silent = [name for name, ok in answers.items() if not ok]
            memory.silent_since = {name: memory.silent_since.get(name, look.at) for name in silent}
        stall = find_stall(look, memory.silent_since, clock_was_set=set_lately)
        health = judge_look(look, memory)
        said = [look.problem] if look.problem else []
        return Watched(look, memory, health, stall, compute_budget_shares(look.limits, look.spent), said)

    # --- act --------------------------------------------------------------------------------------------------------

    def _act(self, seen: Watched) -> None:
        record, look = seen.record, seen.look
        if record.has_ended:
            crashed = record.status == "failed" and record.healthy_at is not None and record.stop_reason is None
            wanted = crashed and look.limits.on_crash == "resume" and record.auto_resumes < MOST_RESUMES
            if record.resume_wanted or wanted:
                self._resume(seen)
        elif record.status == "running":
            over = find_exceeded_budget(look.limits, look.spent)
            if over:
                self._stop(seen, over)
            elif seen.stall:
                self._stalled(seen, seen.stall)
            elif seen.health.word == "broken" and look.limits.on_broken == "stop":
                self._stop(seen, f"learning is broken: {seen.health.evidence[0]}")
        elif record.status == "stopping":
            self._unstick(seen)
        self._tell_changes(seen)
        self._write_health(seen)

    def _stop(self, seen: Watched, reason: str, *, resume: bool = False) -> None:
        launcher.cancel_run(self.store, seen.record, reason)
        if resume:  # after it: a run that could not be asked to end must not be resumed one day
            self.store.update(seen.record.run_id, resume_wanted=True)
        seen.said.append(f"asked to save a checkpoint and end{', then to go on' if resume else ''}: {reason}")

    def _stalled(self, seen: Watched, stall: Stall) -> None:
        reason, policy = f"stalled: {stall.part} since {stall.since}; {stall.evidence}", seen.look.limits.on_stall
        if policy == "stop" or (policy == "resume" and seen.record.auto_resumes >= MOST_RESUMES):
            self._stop(seen, reason)
        elif policy == "resume":
            self._stop(seen, reason, resume=True)

    def _resume(self, seen: Watched) -> None:
        record = seen.record
        if self.store.dir(record.run_id).is_alive():
            return
        if record.status == "completed":
            self.store.update(record.run_id, resume_wanted=False)
            return
        resumes = record.auto_resumes + 1
        newest = Checkpoints(self.store.dir(record.run_id).checkpoints).find_newest()
        where = f"resumed from its checkpoint of step {newest.step}" if newest else "begun again, as it has no checkpoint"
        resubmit_run(self.store, record, auto_resumes=resumes)
        seen.said.append(f"{where} (time {resumes} of {MOST_RESUMES} without a person)")

    def _unstick(self, seen: Watched) -> None:
        """A run whose end takes longer than any of its services may: end what of it still holds it."""
        seen.memory.held_since = seen.memory.held_since or time.monotonic()
        if time.monotonic() - seen.memory.held_since > HELD_S:
            folder = seen.look.folder
            flows = set(cleanup.find_flow_processes(self.store.home))  # another one may have opened the file, such as a backup
            stuck = [one for one in leftovers.find_lock_holders(folder.lock) if one in flows]
            stuck += leftovers.find_processes(folder.path).get(folder.path, [])
            seen.said += [f"ended what held it too long: {one}" for one in leftovers.terminate_processes(stuck)]

    def _end_leftovers(self, seen: list[Watched]) -> None:
        """Processes of runs and inference tests whose flow and reaper are gone, and what such a run did not finish."""
        ended = {one.look.folder.path: one for one in seen if one.record.has_ended}
        for one in ended.values():
            if not one.look.folder.is_alive():
                one.said += [left.clean_up() for left in cleanup.find_run_leftovers(one.look.folder, one.record)]
        for path, processes in leftovers.find_processes(self.store.home).items():
            run = ended.get(path)
            if (run is None and path.parent == self.store.root) or RunDir(path.parent, path.name).is_alive():
                continue  # a run that lives, or is being started
            told = [f"ended what it had left behind: {one}" for one in leftovers.terminate_processes(processes)]
            if run is not None:
                run.said += told
            else:
                log.info("inference test %s: %s", path.name, "; ".join(told))

    # --- tell -------------------------------------------------------------------------------------------------------

    def _tell_changes(self, seen: Watched) -> None:
        """Events for automations, once per stall and once per verdict."""
        part = seen.stall.part if seen.stall else None
        if part and part != seen.memory.stalled:
            self._emit(seen, "stalled", seen.stall.model_dump() if seen.stall else {})
            seen.said.append(f"stalled in {part}: {seen.stall.evidence if seen.stall else ''}")
        if seen.health.word == "broken" and seen.memory.judged != "broken":
            self._emit(seen, "broken", seen.health.model_dump())
            seen.said.append(f"learning is broken: {seen.health.evidence[0]}")
        seen.memory.stalled, seen.memory.judged = part, seen.health.word

    def _emit(self, seen: Watched, what: str, payload: Json) -> None:
        record = seen.record
        resource = {
            "prefect.resource.id": f"lachesis.run.{record.run_id}",
            "prefect.resource.name": f"{record.environment}-{record.run_id}",
        }
        related = [{"prefect.resource.id": f"prefect.flow-run.{record.flow_run_id}", "prefect.resource.role": "flow-run"}]
        with contextlib.suppress(ServerDownError):
            told = {"message": payload, "page": launcher.get_run_url(record) or ""}
            PrefectApi().emit_event(f"lachesis.run.{what}", resource, related=related, payload=told)

    def _write_health(self, seen: Watched) -> None:
        found = health_entry(seen.look, seen.health, seen.stall)
        self.store.update(seen.record.run_id, health=found)
        seen.look.record = seen.record.model_copy(update={"health": found})

    def _remember(self, seen: Watched) -> None:
        save_memory(seen.look.folder, seen.memory)


def _clock_was_set(memory: Memory, patience_s: float) -> bool:
    """Whether somebody has set the time lately: then what happened before it is no measure of how long anything takes."""
    clock, ahead_s = time.monotonic(), time.time() - time.monotonic()
    if memory.ahead_s is not None and abs(ahead_s - memory.ahead_s) > SET_S:
        memory.set_at, memory.silent_since = clock, {}
    memory.ahead_s = ahead_s
    return memory.set_at is not None and 0 <= clock - memory.set_at < patience_s
