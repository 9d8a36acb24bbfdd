"""Take over what people made with the deployments of 0.1.0, which had other names.

Those deployments were called `local`, or `local-HASH` at a shared server, and took the id of a
record as their parameter.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lachesis.base.json_text import Json
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.orchestration.server import (
    LOCAL,
    MONITOR_FLOW,
    NIGHTLY_FLOW,
    TEST_FLOW,
    TRAINING_FLOW,
    get_deployment_name,
    get_deployment_suffix,
)

log = logging.getLogger("lachesis.runner")
NEW_FLOWS = {
    "launch-training": TRAINING_FLOW,
    "validate-environment": TEST_FLOW,
    "monitor-training": MONITOR_FLOW,
    "validate-all-environments": NIGHTLY_FLOW,
}
RENAMED = "an update has renamed its deployment; `lachesis resume` continues the run"


def retire_former_deployments(home: Path) -> None:
    """Delete the deployments of 0.1.0, after the schedules of the nightly tests were taken over.

    A flow run of theirs that waits, or is suspended, is cancelled, because no runner would start
    it.

    Raises:
        ServerDownError: The server does not respond.
    """
    suffix = get_deployment_suffix(home)
    name = LOCAL if suffix == LOCAL else f"{LOCAL}-{suffix}"
    with PrefectApi().reuse_connection() as api:
        for former_flow, flow in NEW_FLOWS.items():
            deployment = api.read_deployment(former_flow, name)
            if deployment is None:
                continue
            if flow == NIGHTLY_FLOW:
                _move_schedules(api, deployment, get_deployment_name(flow, home))
            for flow_run in api.list_waiting_flow_runs(deployment["id"]):
                state = {"type": "CANCELLED", "name": "Cancelled", "message": RENAMED}
                api.set_state(flow_run["id"], state, force=True)
            api.delete_deployment(deployment["id"])
            log.info("the deployment %s/%s is %s now", former_flow, name, flow)


def _move_schedules(api: PrefectApi, former: Json, name: str) -> None:
    """Add the schedules that people have made for a former deployment to the one of this name."""
    deployment = api.read_deployment(NIGHTLY_FLOW, name) or {"schedules": []}
    taken_slugs = {schedule["slug"] for schedule in deployment["schedules"]}
    for schedule in former["schedules"]:
        slug = schedule.get("slug") or f"person-{schedule['id'][:8]}"
        if slug not in taken_slugs:
            api.create_schedule(
                deployment["id"],
                {"schedule": schedule["schedule"], "active": schedule["active"], "slug": slug},
            )
