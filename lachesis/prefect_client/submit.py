"""Submit, cancel and find runs and tests as Prefect flow runs."""

import logging
from pathlib import Path
from typing import Any

from lachesis.base.errors import ServerDownError, StorageError
from lachesis.base.json_text import Json
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore
from lachesis.prefect_client.api_requests import was_never_sent, was_refused
from lachesis.prefect_client.background_serve import (
    TEST_FLOW,
    TRAINING_FLOW,
    find_deployment,
    get_max_runs,
)
from lachesis.prefect_client.serve_info import find_api_url
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore

log = logging.getLogger(__name__)
# The phase of a pending run whose submission Prefect has not confirmed.
UNCONFIRMED = "waiting for Prefect's answer; the start is sent again until there is one"


class AnswerUnknownError(Exception):
    """It is not known whether the server has scheduled a requested flow run."""


def submit_run(store: RunStore, record: RunRecord) -> RunRecord:
    """Schedule the run; the same run and attempt is scheduled only once.

    Returns:
        The record. Where the server's answer is not known, it names no flow run and stays pending;
            see `lachesis.prefect_client.pending_submissions`.

    Raises:
        ServerDownError: This call has certainly scheduled nothing.
    """
    try:
        url, flow_run_id = schedule_flow_run(
            TRAINING_FLOW,
            store.home,
            name=record.title,
            parameters=list_parameters(record),
            tags=list_tags(record),
            key=record.submission_key,
        )
    except AnswerUnknownError as error:
        log.info("run %s: %s", record.run_id, error)
        changes: Json = {"phase": UNCONFIRMED}
    else:
        changes = {"flow_run_id": flow_run_id, "prefect_api_url": url, "phase": "queued"}
    try:
        return store.change(record.run_id, lambda newest: _select(changes, newest, record.attempt))
    except StorageError as error:  # What Prefect has accepted is not taken back.
        log.warning("run %s: its flow run is not recorded: %s", record.run_id, error)
        return record.model_copy(update=changes)


def _select(changes: Json, newest: RunRecord, attempt: int) -> Json:
    """Return the changes, or none for a run whose flow has begun meanwhile."""
    return changes if (newest.attempt, newest.status) == (attempt, "pending") else {}


def list_parameters(record: RunRecord) -> Json:
    """Return the parameters of a run's flow run."""
    set_fields = {name: value for name, value in record.set_fields.items() if value is not None}
    spec = record.spec.with_set_fields(set_fields)
    parameters = {**spec.to_parameters(), "run_id": record.run_id}
    return {**parameters, "by_agent": True} if record.by_agent else parameters


# How the tags begin that say what a flow run is about.
OWN_TAGS = ("run:", "test:", "environment:")


def list_tags(record: RunRecord) -> list[str]:
    """Return the tags by which a run's flow runs are found."""
    return ["lachesis", f"run:{record.run_id}", f"environment:{record.environment}"]


def schedule_flow_run(
    flow: str, home: Path, *, name: str, parameters: dict[str, Any], tags: list[str], key: str
) -> tuple[str, str]:
    """Schedule a run of one of this home's deployments; return the server's URL and the flow run's
    id.

    Raises:
        ServerDownError: This call has certainly scheduled nothing.
        AnswerUnknownError: Nobody knows whether it has.
    """
    api, deployment = find_deployment(flow, home)
    try:
        flow_run = api.create_flow_run(
            deployment["id"], name=name, parameters=parameters, tags=tags, key=key
        )
    except ServerDownError as error:
        if was_refused(error) or was_never_sent(error):
            raise
        raise AnswerUnknownError(str(error)) from error
    return api.url, str(flow_run["id"])


def submit_test(tests: InferenceTestStore, test: InferenceTest) -> InferenceTest:
    """Schedule the inference test; where the server's answer is not known, it stays pending.

    Raises:
        ServerDownError: This call has certainly scheduled nothing.
    """
    try:
        _, flow_run_id = schedule_flow_run(
            TEST_FLOW,
            tests.home,
            name=make_test_title(test),
            parameters={**test.request.spec.to_parameters(), "test_id": test.test_id},
            tags=list_test_tags(test),
            key=test.submission_key,
        )
        tests.save_flow_run_id(test.test_id, flow_run_id)
    except AnswerUnknownError as error:
        log.info("test %s: %s", test.test_id, error)
    except StorageError as error:  # What Prefect has accepted is not taken back.
        log.warning("test %s: its flow run is not recorded: %s", test.test_id, error)
    return test


def make_test_title(test: InferenceTest) -> str:
    """Return the name of a test's flow run."""
    return f"test-{test.request.environment}-{test.test_id}"


def list_test_tags(test: InferenceTest) -> list[str]:
    """Return the tags by which a test's flow run is found."""
    return ["lachesis", f"test:{test.test_id}", f"environment:{test.request.environment}"]


def find_queue_position(record: RunRecord, home: Path) -> dict[str, int] | None:
    """Return the position of a pending run while this host runs its maximum; None if nothing
    delays it, or Prefect does not respond.

    The keys are `place` (1 is next), `running` and `limit`.
    """
    if record.status != "pending" or record.flow_run_id is None:
        return None
    try:
        api, deployment = find_deployment(TRAINING_FLOW, home)
        flow_run = api.read_flow_run(record.flow_run_id) or {}
        if not (start_time := flow_run.get("next_scheduled_start_time")):
            return None
        ahead = api.count_flow_runs(deployment["id"], ["SCHEDULED"], due_before=start_time)
        running = api.count_flow_runs(deployment["id"], ["PENDING", "RUNNING", "CANCELLING"])
    except ServerDownError:
        return None
    limit = get_max_runs()
    # The first runs in the queue start at once while the limit is not reached.
    place = ahead - max(0, limit - running)
    if place > 0:
        return {"place": place, "running": running, "limit": limit}
    return None


def get_run_url(record: RunRecord) -> str | None:
    """Return the URL of the run's page, at the current server or else the server that ran it."""
    url = find_api_url() or record.prefect_api_url
    if not url or not record.flow_run_id:
        return None
    return f"{url.removesuffix('/api')}/runs/flow-run/{record.flow_run_id}"
