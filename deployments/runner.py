"""The process that executes the flow runs of this machine: `python -m deployments.runner`, from the checkout.

Prefect's `serve()` kills flow processes when it is told to end, without their `finally`. This runner instead cancels
them, waits until each has ended its services, and then ends itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId, FlowRunFilterState, FlowRunFilterStateType
from prefect.deployments.runner import RunnerDeployment
from prefect.runner import Runner
from prefect.states import Crashed

from lachesis.launcher import READY_LINE, own_max_runs

log = logging.getLogger("lachesis.runner")

NAME = os.environ.get("LACHESIS_DEPLOYMENT", "local")
LIMITS = {"flows.launch.launch": own_max_runs(), "flows.validate.validate": 2}
"""Flow runs at once per entrypoint. Each has a runner of its own, so that a test need not wait for a training run to end."""


async def main() -> int:
    runners, deployment_ids = [], []
    for entrypoint, limit in LIMITS.items():
        deployment = RunnerDeployment.from_entrypoint(entrypoint, name=NAME)
        runner = Runner(name=f"{deployment.flow_name}-{os.getpid()}", limit=limit, pause_on_shutdown=False)
        deployment_ids.append(await runner.aadd_deployment(deployment))
        runners.append(runner)
    await _reconcile(deployment_ids)
    serving = [asyncio.create_task(runner.start()) for runner in runners]
    while not all(runner.started for runner in runners) and not any(task.done() for task in serving):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # after start(), which installs handlers that kill
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print(READY_LINE, flush=True)
    await asyncio.wait([asyncio.create_task(stop.wait()), *serving], return_when=asyncio.FIRST_COMPLETED)
    lost = [task for task in serving if task.done()]
    for task in lost:
        log.error("a runner ended by itself: %s", task.exception())
    await asyncio.gather(*map(_cancel_all, runners))
    await asyncio.gather(*(runner.astop() for runner in runners))
    await asyncio.gather(*serving, return_exceptions=True)
    return 1 if lost else 0


async def _reconcile(deployment_ids: list[object]) -> None:
    """This is the only runner of its deployments (one launcher and one deployment name per home), so a run that is still
    called running has lost its own. A flow process that survived sees the new state and ends its services."""
    states = FlowRunFilterState(type=FlowRunFilterStateType(any_=["RUNNING", "PENDING", "CANCELLING"]))
    async with get_client() as client:
        lost = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=deployment_ids), state=states)
        )
        for run in lost:
            log.warning("%s had lost its runner; it is marked as crashed", run.name)
            await client.set_flow_run_state(run.id, Crashed(message="its runner was gone"), force=True)


async def _cancel_all(runner: Runner) -> None:
    # astop() alone would cancel one after the other, up to 30 s each.
    ids = list(runner._process_manager.flow_run_ids())
    await asyncio.gather(*(runner._cancellation_manager.cancel_by_id(one) for one in ids), return_exceptions=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(asyncio.run(main()))
