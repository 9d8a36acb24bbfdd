"""Find or make the training run, or the test, that a flow run performs.

The command line and the tools make it before they submit it. A flow run that was started in
Prefect, by a schedule or by an automation has its run made here, with the same checks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lachesis.base.errors import FieldValueError, RunSkippedError, RunStateError, ServerDownError
from lachesis.base.files import hold_file_lock, storage_errors
from lachesis.base.json_text import Json
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.launch_spec import TestParameters, TrainingParameters, check_parameters
from lachesis.environment_catalog.lookup import register_environment
from lachesis.inference_tests.store import InferenceTest
from lachesis.launch.resolved_launch import create_inference_test
from lachesis.launch.resume import belongs_to_attempt, belongs_to_run, is_own_submission
from lachesis.operations.service import LachesisService
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.submit import (
    OWN_TAGS,
    list_tags,
    list_test_tags,
    make_test_key,
    make_test_title,
)
from lachesis.runs.record import SKIPPED, RunRecord
from lachesis.runs.store import RunStore

log = logging.getLogger("lachesis.flow")
# The checkpoints of a schedule's last run that its next run may start from.
LAST_RUN_CHECKPOINTS = ("last", "best")
# What Prefect calls the schedule that has made a flow run if that has no slug.
NAMES_WITHOUT_SLUG = ("CronSchedule", "IntervalSchedule", "RRuleSchedule")


def find_or_create_run(
    service: LachesisService, parameters: Mapping[str, Any], flow_run_id: str | None
) -> RunRecord:
    """Return the run of this flow run; one that has none yet is checked and made.

    A run whose id is among the parameters and that was submitted as another flow run is not
    returned: "Copy to new run" in Prefect copies the id too, and asks for a new run.

    Raises:
        LachesisError: The parameters are refused.
    """
    run_id = str(parameters.get("run_id") or "")
    store = service.store
    if run_id and store.dir(run_id).record.is_file():
        record = store.load(run_id)
        if belongs_to_run(record, flow_run_id):
            return record
    with storage_errors(store.root):
        store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The runner makes the runs of flow runs that wait, and a flow may begin meanwhile.
    with hold_file_lock(store.root / ".requests.lock"):
        record_of_flow_run = _find_record(store, flow_run_id)
        return record_of_flow_run or _create_run(service, parameters, flow_run_id)


def _find_record(store: RunStore, flow_run_id: str | None) -> RunRecord | None:
    """Return the run that was made for a flow run, or is performed by it now."""
    for record in store.all():
        if flow_run_id and flow_run_id in (record.flow_run_id, record.made_for_flow_run_id):
            return record
    return None


def _create_run(
    service: LachesisService, parameters: Mapping[str, Any], flow_run_id: str | None
) -> RunRecord:
    checked = check_parameters(TrainingParameters, parameters)
    schedule = _read_schedule(flow_run_id)
    request = checked.to_request()
    request = replace(
        request,
        environment=register_environment(request.environment),
        start_from=_choose_checkpoint(service.store, checked.from_checkpoint, schedule),
    )
    launch = service.check(request)
    run_id = checked.run_id or ""
    if not run_id or service.store.dir(run_id).record.is_file():
        run_id = service.store.new_id()
    record = service.create_run(
        launch,
        run_id,
        flow_run_id=flow_run_id,
        made_for_flow_run_id=flow_run_id,
        prefect_api_url=PrefectApi().url,
        schedule=schedule,
    )
    log.info("this is run %s; `lachesis status %s` reports it", run_id, run_id)
    _name_flow_run(flow_run_id, record.title, list_tags(record))
    if schedule is not None:
        _require_ended_predecessor(service, record)
    return record


def _read_schedule(flow_run_id: str | None) -> str | None:
    """Return the name of the schedule that has made a flow run, or None.

    Raises:
        ServerDownError: The server does not respond.
    """
    if flow_run_id is None:
        return None
    creator = (PrefectApi().read_flow_run(flow_run_id) or {}).get("created_by") or {}
    if creator.get("type") != "SCHEDULE":
        return None
    slug = creator.get("display_value")
    if slug and slug not in NAMES_WITHOUT_SLUG:
        return str(slug)
    # The runner gives a schedule without a slug this one when it starts.
    return f"person-{str(creator.get('id'))[:8]}"


def _find_runs_of_schedule(store: RunStore, schedule: str | None) -> list[RunRecord]:
    """Return the runs of a schedule, the newest first."""
    return [record for record in store.all() if record.schedule == schedule]


def _choose_checkpoint(store: RunStore, checkpoint: str | None, schedule: str | None) -> str | None:
    """Return the checkpoint to start from: that of the schedule's last run for `last` and `best`.

    The first run of a schedule starts from the base model.

    Raises:
        FieldValueError: Such a word was given outside of a schedule.
    """
    if checkpoint not in LAST_RUN_CHECKPOINTS:
        return checkpoint
    if schedule is None:
        raise FieldValueError(
            f"the parameter from_checkpoint is {checkpoint!r}, which only a schedule may have; "
            "allowed: RUN, RUN@STEP or RUN@best"
        )
    for record in _find_runs_of_schedule(store, schedule):
        if record.has_ended and Checkpoints(store.dir(record.run_id).checkpoints).find_newest():
            return f"{record.run_id}@{checkpoint}"
    return None


def _require_ended_predecessor(service: LachesisService, record: RunRecord) -> None:
    """End a run as skipped while an earlier one of its schedule lives.

    Raises:
        RunSkippedError: One does.
    """
    for other in _find_runs_of_schedule(service.store, record.schedule):
        if other.run_id != record.run_id and not service.get_run(other.run_id).has_ended:
            reason = f"{SKIPPED}run {other.run_id} of the schedule {record.schedule} still runs"
            service.store.update(record.run_id, stop_reason=reason)
            service.store.mark_ended(record.run_id, "stopped", reason)
            raise RunSkippedError(reason)


def _name_flow_run(flow_run_id: str | None, name: str, tags: list[str]) -> None:
    """Give the flow run the name and the tags that it would have from the command line.

    "Copy to new run" in Prefect copies the tags too; those that name another run are left out.
    """
    if flow_run_id is None:
        return
    with contextlib.suppress(ServerDownError):
        api = PrefectApi()
        flow_run: Json = api.read_flow_run(flow_run_id) or {}
        further_tags = [tag for tag in flow_run.get("tags", []) if not tag.startswith(OWN_TAGS)]
        api.update_flow_run(flow_run_id, name=name, tags=sorted({*further_tags, *tags}))


def require_free_run(store: RunStore, record: RunRecord, flow_run_id: str | None) -> None:
    """Check that no other flow run performs the run, as when an earlier one is retried.

    Raises:
        RunStateError: The run is alive, or waits for its place.
    """
    if belongs_to_attempt(record, flow_run_id):
        return
    if store.dir(record.run_id).is_alive() or record.status == "pending":
        raise RunStateError(
            f"run {record.run_id} is {record.status} already, as flow run {record.flow_run_id}; "
            f"`lachesis stop {record.run_id}` ends it"
        )


def find_or_create_test(
    service: LachesisService, parameters: Mapping[str, Any], flow_run_id: str | None
) -> InferenceTest:
    """Return the test of this flow run; one that has none yet is checked and made.

    Raises:
        LachesisError: The parameters are refused.
    """
    tests, test_id = service.tests, str(parameters.get("test_id") or "")
    if test_id and is_own_submission(flow_run_id, make_test_key(test_id)):
        return tests.load(test_id)
    checked = check_parameters(TestParameters, parameters)
    request, options = checked.to_request(), checked.to_options()
    request = replace(request, environment=register_environment(request.environment))
    test = create_inference_test(tests, service.check_test(request, options), options)
    if flow_run_id is not None:
        tests.save_flow_run_id(test.test_id, flow_run_id)
    _name_flow_run(flow_run_id, make_test_title(test), list_test_tags(test))
    return test
