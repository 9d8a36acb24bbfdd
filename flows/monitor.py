"""Define the flow `monitor`: one tick over all living runs, on a schedule."""

import logging
import os
from datetime import UTC, datetime, timedelta

from prefect import flow, runtime

from lachesis.base.errors import ServerDownError
from lachesis.monitor.tick import Monitor
from lachesis.prefect_client.forms import update_environment_choices
from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.store import RunStore

log = logging.getLogger("lachesis.monitor")
# How long ticks are kept; each takes about 70 kB of the database.
TICK_RETENTION = timedelta(hours=2)
MAX_DELETE_ROUNDS = 4


@flow(name="monitor", retries=0)
def monitor() -> None:
    """Look at all living runs once, update the forms of the deployments, and delete old ticks."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the runner's terminal must reach the runner only.
    store = RunStore()
    watched_runs = Monitor(store).tick()
    stalled = [watched_run.record.run_id for watched_run in watched_runs if watched_run.stall]
    log.info("%d runs checked; stalled: %s", len(watched_runs), ", ".join(stalled) or "none")
    try:
        for flow_name in update_environment_choices(store.home):
            log.info("the form of %s has the environments that are found now", flow_name)
    except ServerDownError as error:
        log.warning("the forms were not updated: %s", error)
    delete_old_ticks(runtime.deployment.id, TICK_RETENTION)


def delete_old_ticks(deployment_id: str | None, retention: timedelta) -> int:
    """Delete the ended ticks of this deployment that are older than `retention`, and return how
    many.

    Nothing is deleted while the server does not respond.
    """
    deleted = 0
    try:
        for _ in range(MAX_DELETE_ROUNDS if deployment_id else 0):
            num_deleted = PrefectApi().delete_flow_runs(
                str(deployment_id), before=(datetime.now(UTC) - retention).isoformat()
            )
            deleted += num_deleted
            if not num_deleted:
                break
    except ServerDownError as error:
        log.warning("old ticks were not removed: %s", error)
    return deleted
