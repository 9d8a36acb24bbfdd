"""Run the flow runs of this machine: `python -m deployments.runner`, from the checkout.

Prefect's `serve()` kills flow processes at SIGTERM without running their `finally` blocks. This
runner cancels them instead, waits until each has ended its services, and then ends.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runner import Runner
from prefect.states import Cancelled, Completed, Crashed

from deployments import definitions
from deployments.log_capture import capture_output
from lachesis.base.background_task import keep_running
from lachesis.base.errors import LachesisError
from lachesis.base.waiting import wait_until
from lachesis.prefect_client import pending_submissions
from lachesis.prefect_client.background_serve import (
    READY_LINE,
    START_TIMEOUT_S,
    read_max_runs_setting,
)
from lachesis.prefect_client.internals import (
    cancel_run,
    keep_final_states,
    list_running_ids,
    restart_cancellation_poll,
    stop_claiming_runs,
)
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.runs_from_prefect import record_waiting_runs
from lachesis.runs.end_causes import EndCause
from lachesis.runs.ending import request_stop
from lachesis.runs.store import RunStore

log = logging.getLogger("lachesis.runner")
WATCH_POLL_S = 5.0
# How long after a flow run was marked as crashed its training may still complete: a process that
# survived its runner has only the last checkpoint and the report left to write.
LATE_COMPLETION = timedelta(minutes=15)


@dataclass(frozen=True)
class DeploymentPool:
    """Group deployments that share a limit of concurrent flow runs."""

    deployments: list[RunnerDeployment]
    limit: int | None


def make_pools() -> list[DeploymentPool]:
    """Return the pools: tests do not wait for training runs, nor the monitor for either.

    Raises:
        ConfigError: A setting is not allowed.
    """
    return [
        DeploymentPool([definitions.make_training_deployment()], read_max_runs_setting()),
        DeploymentPool([definitions.make_test_deployment()], 2),
        DeploymentPool(
            [definitions.make_monitor_deployment(), definitions.make_nightly_deployment()], None
        ),
    ]


async def _create_runners() -> tuple[list[Runner], list[UUID]]:
    """Return a runner per pool, and the ids of all deployments."""
    runners, deployment_ids = [], []
    for pool in make_pools():
        name = f"{pool.deployments[0].flow_name}-{os.getpid()}"
        # A tick is claimed only a second before its time: from then on the next tick is cancelled.
        runner = Runner(name=name, limit=pool.limit, pause_on_shutdown=False, prefetch_seconds=1)
        for deployment in pool.deployments:
            await _keep_schedules_of_people(deployment)
            deployment_ids.append(await runner.aadd_deployment(deployment))
        runners.append(runner)
    return runners, deployment_ids


async def _keep_schedules_of_people(deployment: RunnerDeployment) -> None:
    """Add the schedules that people have made for this deployment to its own.

    Registering a deployment replaces all its schedules as soon as one of them has no slug, and
    Prefect's pages and commands make schedules without one.
    """
    async with get_client() as client:
        try:
            registered = await client.read_deployment_by_name(
                f"{deployment.flow_name}/{deployment.name}"
            )
        except ObjectNotFound:
            return
    own = list(deployment.schedules or [])
    own_slugs = {schedule.slug for schedule in own}
    deployment.schedules = own + [
        DeploymentScheduleCreate(
            schedule=schedule.schedule,
            active=schedule.active,
            parameters=schedule.parameters,
            slug=schedule.slug or f"person-{str(schedule.id)[:8]}",
        )
        for schedule in registered.schedules
        if schedule.slug not in own_slugs
    ]


async def main() -> int:
    """Run until SIGTERM, and return the exit code."""
    # The launcher starts this process together with the server, which takes longer.
    await asyncio.to_thread(wait_until, PrefectApi().is_healthy, START_TIMEOUT_S)
    runners, deployment_ids = await _create_runners()
    await _end_orphaned_runs(deployment_ids)
    runner_tasks = [asyncio.create_task(runner.start()) for runner in runners]
    while not all(runner.started for runner in runners):
        if any(task.done() for task in runner_tasks):
            break
        await asyncio.sleep(0.05)
    for runner in runners:
        if runner.started:
            keep_final_states(runner)
    stop_event = asyncio.Event()
    # Installed after start(), whose own handlers kill the flows.
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop_event.set)
    print(READY_LINE, flush=True)
    watch_task = asyncio.create_task(
        keep_running("the watch of flow runs", lambda: _watch_flow_runs(runners, deployment_ids))
    )
    await asyncio.wait(
        [asyncio.create_task(stop_event.wait()), *runner_tasks], return_when=asyncio.FIRST_COMPLETED
    )
    watch_task.cancel()
    ended_tasks = [task for task in runner_tasks if task.done()]
    for task in ended_tasks:
        log.error("a runner ended by itself", exc_info=task.exception())
    for runner in runners:  # Flow runs that are submitted from now on wait for the next runner.
        stop_claiming_runs(runner)
    await asyncio.to_thread(_note_end_of_serve, runners)
    await asyncio.gather(*map(_cancel_all, runners))
    # One that has ended by itself cannot be stopped, and must not keep the others from it.
    await asyncio.gather(*(runner.astop() for runner in runners if runner.started))
    await asyncio.gather(*runner_tasks, return_exceptions=True)
    return 1 if ended_tasks else 0


async def _end_orphaned_runs(deployment_ids: list[UUID]) -> None:
    """Mark flow runs that lost their runner: as completed if their training is, else as crashed.

    This is the only runner of its deployments (one launcher and one deployment name per home), so a
    run that is marked as running belonged to an earlier one. A flow process that survived sees the
    new state and ends its services, or completes what it has begun (`_complete_crashed_runs`).
    """
    async with get_client() as client:
        await _complete_crashed_runs(client, deployment_ids, after=None)
        orphans = await client.read_flow_runs(
            flow_run_filter=_make_flow_run_filter(
                deployment_ids, "RUNNING", "PENDING", "CANCELLING"
            )
        )
        completed_ids = await asyncio.to_thread(_read_completed_ids) if orphans else set()
        for run in orphans:
            if str(run.id) in completed_ids:
                await client.set_flow_run_state(run.id, Completed(), force=True)
                continue
            log.warning("%s had lost its runner; it is marked as crashed", run.name)
            await client.set_flow_run_state(
                run.id, Crashed(message="its runner was gone"), force=True
            )


async def _complete_crashed_runs(
    client: PrefectClient, deployment_ids: list[UUID], *, after: datetime | None
) -> None:
    """Mark crashed flow runs as completed whose training has completed after all.

    A flow process may outlive its runner, or be killed between the end of the training and that of
    the flow run.

    Args:
        client: The client.
        deployment_ids: The deployments whose flow runs are meant.
        after: Only flow runs that were marked as crashed since then. None: all of them.
    """
    crashed = _make_flow_run_filter(deployment_ids, "CRASHED")
    if after:
        crashed.end_time = FlowRunFilterEndTime(after_=after)
    runs = await client.read_flow_runs(flow_run_filter=crashed)
    completed_ids = await asyncio.to_thread(_read_completed_ids) if runs else set()
    for run in runs:
        if str(run.id) in completed_ids:
            log.info("%s has completed after its runner was gone", run.name)
            await client.set_flow_run_state(run.id, Completed(), force=True)


def _read_completed_ids() -> set[str]:
    """Return the flow runs of the training runs that have completed, as their records say."""
    return {
        record.flow_run_id
        for record in RunStore().all()
        if record.status == "completed" and record.flow_run_id
    }


def _make_flow_run_filter(deployment_ids: list[UUID], *states: str) -> FlowRunFilter:
    """Return a filter for flow runs of these deployments in one of these states."""
    types = FlowRunFilterState(type=FlowRunFilterStateType(any_=list(states)))
    return FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=deployment_ids), state=types)


async def _watch_flow_runs(runners: list[Runner], deployment_ids: list[UUID]) -> None:
    """Watch for cancellations, late completions, flow runs that wait for their place, and pending
    submissions.

    Prefect's own watch for cancellations stops permanently after three failed polls.
    """
    without_process: set[UUID] = set()
    async with get_client() as client:
        while True:
            await asyncio.sleep(WATCH_POLL_S)
            for runner in runners:
                restart_cancellation_poll(runner)
            without_process = await _end_cancelled_runs(
                client, runners, deployment_ids, without_process
            )
            await _complete_late_runs(client, deployment_ids)
            await asyncio.to_thread(record_waiting_runs)
            await asyncio.to_thread(pending_submissions.send_all, RunStore())


async def _complete_late_runs(client: PrefectClient, deployment_ids: list[UUID]) -> None:
    """Mark flow runs as completed that were lately marked as crashed and have completed since."""
    try:
        since = datetime.now(UTC) - LATE_COMPLETION
        await _complete_crashed_runs(client, deployment_ids, after=since)
    # An error must not end the watch; the next poll tries again.
    except (httpx.HTTPError, PrefectException, LachesisError) as error:
        log.warning("late completions were not checked: %r", error)


async def _end_cancelled_runs(
    client: PrefectClient,
    runners: list[Runner],
    deployment_ids: list[UUID],
    previous_ids: set[UUID],
) -> set[UUID]:
    """End runs that were cancelled after they were claimed and before they had a process.

    Nobody else would report their end; Prefect's server gives them up after five minutes.

    Returns:
        The cancelled runs without a process now; those that had none in `previous_ids` either are
            ended.
    """
    try:
        cancelling_ids = {
            run.id
            for run in await client.read_flow_runs(
                flow_run_filter=_make_flow_run_filter(deployment_ids, "CANCELLING")
            )
        }
        cancelling_ids -= {
            flow_run_id for runner in runners for flow_run_id in list_running_ids(runner)
        }
        # A run that was claimed a moment ago has no process yet, so one poll proves nothing.
        for flow_run_id in cancelling_ids & previous_ids:
            await client.set_flow_run_state(
                flow_run_id, Cancelled(message="it was cancelled before it began"), force=True
            )
    except (httpx.HTTPError, PrefectException) as error:  # The next poll tries again.
        log.warning("cancelled runs were not checked: %r", error)
        return set()
    return cancelling_ids


def _note_end_of_serve(runners: list[Runner]) -> None:
    """Record why the runs of these runners are about to end; no error keeps them from it."""
    flow_run_ids = {str(run_id) for runner in runners for run_id in list_running_ids(runner)}
    store = RunStore()
    with contextlib.suppress(LachesisError):
        for record in store.all():
            if record.flow_run_id in flow_run_ids:
                request_stop(store, record.run_id, EndCause.SERVE_ENDED)


async def _cancel_all(runner: Runner) -> None:
    # astop() would cancel them one after the other, up to 30 s each.
    await asyncio.gather(
        *(cancel_run(runner, flow_run_id) for flow_run_id in list_running_ids(runner)),
        return_exceptions=True,
    )


if __name__ == "__main__":
    capture_output("runner")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(asyncio.run(main()))
