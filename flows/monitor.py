"""The flow `monitor-training`: one tick over all living runs, on a schedule."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from prefect import flow, runtime

from lachesis.base.errors import ServerDownError
from lachesis.monitor.tick import Monitor
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.runs.store import RunStore

log = logging.getLogger("lachesis.monitor")
KEPT = timedelta(hours=2)
"""A tick is of interest as long as the next ones are near; each takes some seventy kilobytes of the database."""
MOST_ROUNDS = 4


@flow(name="monitor-training", retries=0)
def monitor(home: str) -> None:
    """Look at all living runs once, and remove the records of old ticks."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # Ctrl-C in the terminal of the runner must reach the runner alone
    seen = Monitor(RunStore(Path(home))).tick()
    stalled = [one.record.run_id for one in seen if one.stall]
    log.info("%d runs looked at; stalled: %s", len(seen), ", ".join(stalled) or "none")
    prune(runtime.deployment.id, KEPT)


def prune(deployment_id: str | None, kept: timedelta) -> int:
    """Delete the ended ticks of this deployment that are older than `kept`; how many. A server that is away keeps them."""
    deleted = 0
    try:
        for _ in range(MOST_ROUNDS if deployment_id else 0):
            found = PrefectApi().delete_flow_runs(str(deployment_id), before=(datetime.now(UTC) - kept).isoformat())
            deleted += found
            if not found:
                break
    except ServerDownError as error:
        log.warning("old ticks were not removed: %s", error)
    return deleted
