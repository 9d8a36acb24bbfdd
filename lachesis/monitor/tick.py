"""Run one tick of the monitor: observe all living runs, judge them, apply their policies, and
publish.

The process keeps no state between ticks. What a tick must know of the previous one is in the run's
`monitor.json`.
"""

import contextlib
import logging
import time
from dataclasses import dataclass, field

from lachesis.base.errors import ServerDownError
from lachesis.base.json_text import Json
from lachesis.base.timestamps import seconds_between
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.monitor import prefect_artifacts
from lachesis.monitor.observe import Observation, observe_runs
from lachesis.monitor.run_health import build_health_entry, judge_observation, read_final_judgement
from lachesis.monitor.run_history import RunHealth
from lachesis.monitor.stalls import Stall, find_stall
from lachesis.monitor.tick_memory import MonitorMemory, load_memory, save_memory
from lachesis.prefect_client import refresh, stop
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.resubmit import resubmit_run
from lachesis.prefect_client.submit import get_run_url
from lachesis.runs.end_causes import EndCause
from lachesis.runs.ending import has_crashed, is_elsewhere
from lachesis.runs.folder import RunDir
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.supervision import leftovers, process_marks

log = logging.getLogger("lachesis.monitor")
# Automatic resumes of a run that stalls repeatedly; after that it is stopped.
MAX_AUTO_RESUMES = 3
# Seconds after the end of a run for which its last verdict is published again.
WATCH_AFTER_END_S = 900.0
# Seconds between wall clock and monotonic clock from which the clock was set or the host was
# asleep.
MIN_CLOCK_JUMP_S = 30.0
# Seconds after which a stopping run is stuck. It is longer than any of its services needs to end,
# including a trainer on the Tinker cloud.
MAX_STOPPING_S = 300.0


@dataclass
class WatchedRun:
    """Hold the observation, the judgement and the actions of one tick for one run."""

    observation: Observation
    memory: MonitorMemory
    health: RunHealth
    stall: Stall | None
    messages: list[str] = field(default_factory=list)
    """What this tick did about the run, or could not do."""
    is_published: bool = False
    has_acted: bool = False
    """Whether this tick could do what the policies of the run ask for."""

    @property
    def record(self) -> RunRecord:
        """Return the run's record as it was observed."""
        return self.observation.record


class Monitor:
    """Watch the runs of one home."""

    def __init__(self, store: RunStore) -> None:
        self.store = store

    def tick(self) -> list[WatchedRun]:
        """Observe all living runs, judge them, act on policies, and publish the verdicts.

        A Prefect server that does not answer only prevents publishing. An error with one run does
        not affect the others.
        """
        records, warning = refresh.refresh_runs(self.store, self.store.scan()[0])
        if warning:
            log.warning("%s", warning)
        watched_records = [record for record in records if self._should_watch(record)]
        watched_runs = self._judge_all(watched_records)
        try:
            self._end_leftovers(watched_runs)
        except Exception as error:
            log.warning("leftover processes of dead runs were not ended: %s", error)
        for watched in watched_runs:
            try:
                self._apply_policies(watched)
                watched.has_acted = True
            except Exception as error:
                watched.messages.append(f"not done: {error}")
        try:
            prefect_artifacts.publish_runs(watched_runs)
        except Exception as error:
            log.warning("not everything was published: %s", error)
        for watched in watched_runs:
            self._note_handled_end(watched)
            self._save_memory(watched)
            for message in watched.messages:
                log.info("run %s: %s", watched.record.run_id, message)
        return watched_runs

    def _note_handled_end(self, watched: WatchedRun) -> None:
        """Record that nothing is left to do about a run that has ended, if that is so."""
        record = watched.record
        is_over = (
            record.has_ended
            and not record.resume_requested
            and not watched.observation.run_dir.is_alive()
        )
        is_told = watched.is_published or not self._may_publish(record)
        if is_over and is_told and watched.has_acted:
            self.store.update(record.run_id, if_attempt=record.attempt, is_end_handled=True)

    def _judge_all(self, records: list[RunRecord]) -> list[WatchedRun]:
        watched_runs = []
        for observation in observe_runs(self.store, records):
            try:
                watched_runs.append(self._judge(observation))
            except Exception:
                log.exception("run %s cannot be judged", observation.record.run_id)
        return watched_runs

    def publish_verdict(self, record: RunRecord) -> RunRecord:
        """Judge and publish one run without waiting for the next tick, and return its record.

        The next tick still applies policies and looks for leftover processes.

        Raises:
            LachesisError: The Prefect server does not answer, or refuses the verdict.
        """
        watched = self._judge(observe_runs(self.store, [record])[0])
        self._write_health(watched)
        with PrefectApi().reuse_connection() as api:
            prefect_artifacts.publish_run(api, watched)
        self._save_memory(watched)
        return watched.record

    def _should_watch(self, record: RunRecord) -> bool:
        if is_elsewhere(record):  # Its own host watches it.
            return False
        if not record.has_ended:
            return record.status != "pending"
        # However long ago it has ended: nobody may have looked since, as with a laptop that slept.
        return record.resume_requested or not record.is_end_handled

    def _may_publish(self, record: RunRecord) -> bool:
        """Return whether the last verdict on an ended run may still reach its flow run."""
        return (
            record.flow_run_id is not None
            and record.ended_at is not None
            and seconds_between(record.ended_at) < WATCH_AFTER_END_S
        )

    # --- judge

    def _judge(self, observation: Observation) -> WatchedRun:
        """Return what a tick finds of one run: its stall, its judgement, and problems."""
        memory = load_memory(observation.run_dir, observation.record)
        has_answered = {
            "trainer": observation.trainer_health is not None,
            "api": observation.api_counts is not None,
            "engine": observation.is_engine_alive is not False,
        }
        has_clock_changed = _has_clock_changed(memory, observation.limits.stall_after_s)
        if observation.record.status == "running" and not has_clock_changed:
            silent_services = [name for name, ok in has_answered.items() if not ok]
            memory.silent_since = {
                name: memory.silent_since.get(name, observation.observed_at)
                for name in silent_services
            }
        stall = find_stall(observation, memory.silent_since, has_clock_changed=has_clock_changed)
        health = read_final_judgement(observation.record) or judge_observation(observation, memory)
        messages = [observation.problem] if observation.problem else []
        return WatchedRun(observation, memory, health, stall, messages)

    # --- act

    def _apply_policies(self, watched: WatchedRun) -> None:
        """Stop or resume a run as its limits say."""
        record, observation = watched.record, watched.observation
        if record.has_ended:
            should_resume = (
                has_crashed(record)
                and observation.limits.on_crash == "resume"
                and record.auto_resumes < MAX_AUTO_RESUMES
            )
            if record.resume_requested or should_resume:
                self._resume_run(watched)
        elif record.status == "running":
            if watched.stall:
                self._apply_stall_policy(watched, watched.stall)
            elif (
                watched.health.word == "broken" and observation.limits.on_learning_failure == "stop"
            ):
                sentence = f"learning is broken: {watched.health.evidence[0]}"
                self._request_stop(watched, EndCause.BROKEN_LEARNING, sentence)
        elif record.status == "stopping":
            self._end_stuck_processes(watched)
        self._emit_changes(watched)
        self._write_health(watched)

    def _request_stop(
        self, watched: WatchedRun, cause: EndCause, reason: str, *, should_resume: bool = False
    ) -> None:
        """Ask a run to save and end; with `should_resume` it is resumed once it has ended."""
        stop.cancel_run(self.store, watched.record, cause, reason)
        # set afterwards: a run whose stop was not requested must not be resumed later
        if should_resume:
            self.store.update(watched.record.run_id, resume_requested=True)
        watched.messages.append(
            f"asked to save a checkpoint and end{', then to go on' if should_resume else ''}: "
            f"{reason}"
        )

    def _apply_stall_policy(self, watched: WatchedRun, stall: Stall) -> None:
        """Stop a stalled run, or stop it to be resumed, as its policy says."""
        reason, policy = (
            f"stalled: {stall.part} since {stall.since}; {stall.evidence}",
            watched.observation.limits.on_stall,
        )
        if policy == "stop" or (
            policy == "resume" and watched.record.auto_resumes >= MAX_AUTO_RESUMES
        ):
            self._request_stop(watched, EndCause.STALLED, reason)
        elif policy == "resume":
            self._request_stop(watched, EndCause.STALLED, reason, should_resume=True)

    def _resume_run(self, watched: WatchedRun) -> None:
        """Resume a run that has ended, from its newest checkpoint if there is any."""
        record = watched.record
        if self.store.dir(record.run_id).is_alive():
            return
        if record.status == "completed":
            self.store.update(record.run_id, resume_requested=False)
            return
        num_resumes = record.auto_resumes + 1
        start = Checkpoints(self.store.dir(record.run_id).checkpoints).describe_start()
        # What is left to agents may have become less since the run was started.
        resubmit_run(self.store, record, by_owner=not record.by_agent, auto_resumes=num_resumes)
        watched.messages.append(
            f"resumed {start} (time {num_resumes} of {MAX_AUTO_RESUMES} without a person)"
        )

    def _end_stuck_processes(self, watched: WatchedRun) -> None:
        """End the processes of a run that takes longer to stop than any of its services may."""
        watched.memory.stopping_since = watched.memory.stopping_since or time.monotonic()
        if time.monotonic() - watched.memory.stopping_since > MAX_STOPPING_S:
            run_dir = watched.observation.run_dir
            # another program, such as a backup, may have opened the file
            flow_processes = set(leftovers.find_flow_processes(self.store.home))
            stuck_processes = [
                process
                for process in process_marks.find_lock_holders(run_dir.lock)
                if process in flow_processes
            ]
            stuck_processes += process_marks.find_processes(run_dir.path).get(run_dir.path, [])
            watched.messages += [
                f"ended a process that kept it from stopping: {description}"
                for description in process_marks.terminate_processes(stuck_processes)
            ]

    def _end_leftovers(self, watched_runs: list[WatchedRun]) -> None:
        """End the processes of runs and tests whose flow and reaper are gone, and clean up."""
        ended_runs = {
            watched.observation.run_dir.path: watched
            for watched in watched_runs
            if watched.record.has_ended
        }
        for watched in ended_runs.values():
            run_dir = watched.observation.run_dir
            if not run_dir.is_alive():
                run_leftovers = leftovers.find_run_leftovers(run_dir, watched.record)
                watched.messages += [leftover.clean_up() for leftover in run_leftovers]
        # A process is recognised by the mark of its folder in its environment, which children
        # inherit.
        for path, processes in process_marks.find_processes(self.store.home).items():
            owner = ended_runs.get(path)
            if (owner is None and path.parent == self.store.root) or RunDir(
                path.parent, path.name
            ).is_alive():
                continue  # the run is alive or being started
            messages = [
                f"ended a leftover process: {description}"
                for description in process_marks.terminate_processes(processes)
            ]
            if owner is not None:
                owner.messages += messages
            else:
                log.info("inference test %s: %s", path.name, "; ".join(messages))

    # --- report

    def _emit_changes(self, watched: WatchedRun) -> None:
        """Emit events for Prefect automations, once per stall and once per judgement."""
        stalled_part = watched.stall.part if watched.stall else None
        if stalled_part and stalled_part != watched.memory.reported_stall:
            self._emit_event(
                watched, "stalled", watched.stall.model_dump() if watched.stall else {}
            )
            watched.messages.append(
                f"stalled in {stalled_part}: {watched.stall.evidence if watched.stall else ''}"
            )
        if watched.health.word == "broken" and watched.memory.reported_health != "broken":
            self._emit_event(watched, "broken", watched.health.model_dump())
            watched.messages.append(f"learning is broken: {watched.health.evidence[0]}")
        watched.memory.reported_stall, watched.memory.reported_health = (
            stalled_part,
            watched.health.word,
        )

    def _emit_event(self, watched: WatchedRun, event: str, payload: Json) -> None:
        """Send an event about a run to automations; without a server nothing is sent."""
        record = watched.record
        resource = {
            "prefect.resource.id": f"lachesis.run.{record.run_id}",
            "prefect.resource.name": f"{record.environment}-{record.run_id}",
        }
        related = [
            {
                "prefect.resource.id": f"prefect.flow-run.{record.flow_run_id}",
                "prefect.resource.role": "flow-run",
            }
        ]
        with contextlib.suppress(ServerDownError):
            event_payload = {"message": payload, "page": get_run_url(record) or ""}
            PrefectApi().emit_event(
                f"lachesis.run.{event}", resource, related=related, payload=event_payload
            )

    def _write_health(self, watched: WatchedRun) -> None:
        """Write the judgement into the record, unless the final one is there."""
        record = watched.record
        if read_final_judgement(record):
            return
        entry = build_health_entry(watched.observation, watched.health, watched.stall)
        # It holds what others have changed since, such as tags.
        watched.observation.record = self.store.update(
            record.run_id, if_attempt=record.attempt, health=entry
        )

    def _save_memory(self, watched: WatchedRun) -> None:
        save_memory(watched.observation.run_dir, watched.memory)


def _has_clock_changed(memory: MonitorMemory, patience_s: float) -> bool:
    """Return whether the clock was set recently, so that times cannot be compared."""
    monotonic_s, clock_offset_s = time.monotonic(), time.time() - time.monotonic()
    if (
        memory.clock_offset_s is not None
        and abs(clock_offset_s - memory.clock_offset_s) > MIN_CLOCK_JUMP_S
    ):
        memory.clock_changed_at, memory.silent_since = monotonic_s, {}
    memory.clock_offset_s = clock_offset_s
    return (
        memory.clock_changed_at is not None
        and 0 <= monotonic_s - memory.clock_changed_at < patience_s
    )
