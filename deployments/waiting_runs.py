"""Make the runs of flow runs that wait for their place.

A flow makes its run when it begins. One that was started in Prefect while this host trains as many
runs as it may would not be listed until then, and would be refused only then.
"""

from __future__ import annotations

import logging

from flows.flow_run_state import make_refusal
from flows.requested_runs import find_or_create_run
from lachesis.base.errors import LachesisError, ServerDownError
from lachesis.base.json_text import Json
from lachesis.base.timestamps import seconds_between
from lachesis.operations.service import LachesisService
from lachesis.prefect_client.background_serve import TRAINING_FLOW, find_deployment
from lachesis.prefect_client.resources import PrefectApi

log = logging.getLogger("lachesis.runner")
# A flow run that has waited this long was not started at once, so it waits for its place.
MIN_WAIT_S = 5.0
# The runner cannot end while an environment is imported.
SCHEMA_TIMEOUT_S = 25.0


def record_waiting_runs() -> None:
    """Make the run of each flow run of `train` that waits and has none, or refuse it.

    A server that does not respond is asked again later, and no error ends the runner.
    """
    service = LachesisService(schema_timeout_s=SCHEMA_TIMEOUT_S)
    try:
        api, deployment = find_deployment(TRAINING_FLOW, service.store.home)
        waiting = [
            flow_run
            for flow_run in api.list_waiting_flow_runs(deployment["id"], due_only=True)
            if _has_waited(flow_run)
        ]
        if not waiting:  # The records of all runs are read only when there is a reason.
            return
        known_ids = {
            flow_run_id
            for record in service.store.all()
            for flow_run_id in (record.flow_run_id, record.made_for_flow_run_id)
        }
        for flow_run in waiting:
            if flow_run["id"] not in known_ids:
                _record_run(service, api, flow_run)
    except LachesisError as error:
        log.warning("waiting flow runs were not recorded: %s", error)
    except Exception:
        log.exception("waiting flow runs were not recorded")


def _has_waited(flow_run: Json) -> bool:
    start_time = flow_run.get("next_scheduled_start_time") or flow_run["created"]
    return seconds_between(start_time) > MIN_WAIT_S


def _record_run(service: LachesisService, api: PrefectApi, flow_run: Json) -> None:
    try:
        find_or_create_run(service, flow_run["parameters"], flow_run["id"])
    except ServerDownError:
        raise
    except LachesisError as error:
        refusal = make_refusal(error)
        state = {"type": refusal.type.value, "name": refusal.name, "message": refusal.message}
        api.set_state(flow_run["id"], state, force=True)
