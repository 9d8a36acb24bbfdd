"""Find or make the training run, or the test, that a flow run performs or waits to perform.

The command line and the tools make it before they submit it. A flow run that was started in
Prefect, by a schedule or by an automation has its run made here, with the same checks: when it
begins, or before, when it waits while this host trains as many runs as it may.
"""

import contextlib
import logging
import re
from collections.abc import Mapping
from typing import Any

from lachesis.base.errors import (
    ArgumentsError,
    FieldValueError,
    LachesisError,
    RunSkippedError,
    RunStateError,
    ServerDownError,
    shorten,
)
from lachesis.base.files import hold_file_lock, storage_errors
from lachesis.base.json_text import Json
from lachesis.base.secrets import redact
from lachesis.base.timestamps import seconds_between
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config.launch_spec import RUN_ID_PATTERN, LaunchSpec, TestSpec, read_spec
from lachesis.environment_catalog.lookup import SCHEMA_TIMEOUT_S
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore
from lachesis.launch.create_run import create_run, create_test
from lachesis.launch.resolve import check_launch, resolve_test
from lachesis.prefect_client import background_serve
from lachesis.prefect_client.background_serve import TRAINING_FLOW, find_deployment
from lachesis.prefect_client.flow_run_keys import (
    choose_run_id,
    derive_run_id,
    is_own_submission,
    is_submission_key,
)
from lachesis.prefect_client.refresh import refresh_runs
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.submit import OWN_TAGS, list_tags, list_test_tags, make_test_title
from lachesis.runs.end_causes import EndCause
from lachesis.runs.ending import end_run
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.spending.ledger import has_had_run

log = logging.getLogger("lachesis.flow")
# A flow run that has waited this long was not started at once, so it waits for its place.
MIN_WAIT_S = 5.0
# The runner cannot end while an environment is imported.
WAITING_SCHEMA_TIMEOUT_S = 25.0
# The checkpoints of a schedule's last run that its next run may start from.
LAST_RUN_CHECKPOINTS = ("last", "best")
# What Prefect calls the schedule that has made a flow run if that has no slug.
NAMES_WITHOUT_SLUG = ("CronSchedule", "IntervalSchedule", "RRuleSchedule")


def find_or_create_run(
    store: RunStore,
    parameters: Mapping[str, Any],
    flow_run_id: str | None,
    schema_timeout_s: float = SCHEMA_TIMEOUT_S,
) -> RunRecord:
    """Return the run of this flow run; a flow run without a run has its run checked and made.

    Raises:
        LachesisError: The parameters are refused.
    """
    given_id, spec_values = _split_id(parameters, "run_id")
    run_id = choose_run_id(store, given_id, flow_run_id)
    if store.dir(run_id).record.is_file():
        return store.load(run_id)
    with storage_errors(store.root):
        store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The runner makes the runs of flow runs that wait, and a flow may begin meanwhile.
    with hold_file_lock(store.root / ".requests.lock"):
        if store.dir(run_id).record.is_file():
            return store.load(run_id)
        if flow_run_id is not None and has_had_run(store.home, run_id):
            raise RunStateError(
                f"run {run_id} of this flow run was removed; `lachesis train` or *Copy to new run* "
                "starts another one"
            )
        return _create_run(store, spec_values, run_id, flow_run_id, schema_timeout_s)


def _create_run(
    store: RunStore,
    spec_values: Json,
    run_id: str,
    flow_run_id: str | None,
    schema_timeout_s: float,
) -> RunRecord:
    """Check the parameters of a flow run and create its run; beside a living one it is skipped."""
    spec = read_spec(LaunchSpec, spec_values)
    schedule = _read_schedule(flow_run_id)
    living = schedule and _find_living_run(store, schedule)
    checkpoint = _choose_checkpoint(store, spec.from_checkpoint, schedule)
    spec = spec.model_copy(update={"from_checkpoint": checkpoint})
    tests = InferenceTestStore(store.home)
    launch = check_launch(spec, store, tests, schema_timeout_s, background_serve.read_key_names())
    record = create_run(
        store,
        tests,
        launch,
        run_id,
        flow_run_id=flow_run_id,
        made_for_flow_run_id=flow_run_id,
        prefect_api_url=PrefectApi().url,
        schedule=schedule,
    )
    log.info("this is run %s; `lachesis status %s` reports it", run_id, run_id)
    _name_flow_run(flow_run_id, record.title, list_tags(record))
    if living:
        reason = _describe_skip(living)
        end_run(store, record, EndCause.SKIPPED, reason)
        raise RunSkippedError(reason)
    return record


def _split_id(parameters: Mapping[str, Any], name: str) -> tuple[str, Json]:
    """Return the id among the parameters of a flow run, and the others.

    Raises:
        ArgumentsError: It is not an id.
    """
    spec_values = {key: value for key, value in parameters.items() if key != name}
    text = str(parameters.get(name) or "")
    if text and not re.fullmatch(RUN_ID_PATTERN, text):
        raise ArgumentsError(
            f"the parameter {name} is {shorten(repr(text))}; allowed: eight hexadecimal digits"
        )
    return text, spec_values


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


def _find_living_run(store: RunStore, schedule: str) -> RunRecord | None:
    """Return the run of a schedule that has not ended, or None.

    Raises:
        RunSkippedError: There is, and the list of runs shows already that a start was skipped
            beside it.
    """
    runs = _find_runs_of_schedule(store, schedule)
    for record in refresh_runs(store, [record for record in runs if not record.has_ended])[0]:
        if not record.has_ended:
            reason = _describe_skip(record)
            if runs[0].end_cause is EndCause.SKIPPED:
                raise RunSkippedError(reason)
            return record
    return None


def _describe_skip(living: RunRecord) -> str:
    return f"skipped: run {living.run_id} of the schedule {living.schedule} still runs"


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


def find_or_create_test(
    tests: InferenceTestStore, parameters: Mapping[str, Any], flow_run_id: str | None
) -> InferenceTest:
    """Return the test of this flow run; one that has none yet is checked and made.

    Raises:
        LachesisError: The parameters are refused.
    """
    test_id, spec_values = _split_id(parameters, "test_id")
    if test_id and is_own_submission(flow_run_id, f"test-{test_id}"):
        return _take_submitted_test(tests, test_id, flow_run_id)
    spec = read_spec(TestSpec, spec_values)
    resolved = resolve_test(spec, tests.home, SCHEMA_TIMEOUT_S, background_serve.read_key_names())
    test = create_test(tests, resolved)
    if flow_run_id is not None:
        tests.save_flow_run_id(test.test_id, flow_run_id)
    _name_flow_run(flow_run_id, make_test_title(test), list_test_tags(test))
    return test


def _take_submitted_test(
    tests: InferenceTestStore, test_id: str, flow_run_id: str | None
) -> InferenceTest:
    """Return the test that a flow run was submitted for, whose flow run is known from now on.

    Raises:
        RunStateError: It has ended before it was known that Prefect had accepted it.
    """
    test = tests.load(test_id)
    if flow_run_id is not None and tests.read_flow_run_id(test_id) is None:
        if test.has_ended:
            raise RunStateError(f"test {test_id} had {test.status} before it began; start it again")
        tests.save_flow_run_id(test_id, flow_run_id)
    return test


# --- flow runs that wait for their place


def record_waiting_runs() -> None:
    """Make the run of each flow run of `train` that waits and has none, or refuse it.

    Otherwise the run would not be listed until its flow begins, and would be refused only then. A
    server that does not respond is asked again later, and no error ends the runner.
    """
    store = RunStore()
    try:
        api, deployment = find_deployment(TRAINING_FLOW, store.home)
        waiting = [
            flow_run
            for flow_run in api.list_waiting_flow_runs(deployment["id"], due_only=True)
            if _has_waited(flow_run)
        ]
        for flow_run in waiting:
            key = str(flow_run.get("idempotency_key") or "")
            run_id = derive_run_id(store, flow_run["id"])
            # The run of a submitted flow run was made before it.
            if not is_submission_key(key) and not store.dir(run_id).record.is_file():
                _record_run(store, api, flow_run)
    except LachesisError as error:
        log.warning("waiting flow runs were not recorded: %s", error)
    except Exception:
        log.exception("waiting flow runs were not recorded")


def _has_waited(flow_run: Json) -> bool:
    start_time = flow_run.get("next_scheduled_start_time") or flow_run["created"]
    return seconds_between(start_time) > MIN_WAIT_S


def _record_run(store: RunStore, api: PrefectApi, flow_run: Json) -> None:
    try:
        find_or_create_run(store, flow_run["parameters"], flow_run["id"], WAITING_SCHEMA_TIMEOUT_S)
    except ServerDownError:
        raise
    except LachesisError as error:
        api.set_state(flow_run["id"], describe_refusal(error), force=True)


def describe_refusal(error: LachesisError) -> dict[str, str]:
    """Return the state of a refused or skipped flow run, with the error's message."""
    if isinstance(error, RunSkippedError):
        return {"type": "CANCELLED", "name": "Skipped", "message": str(error)}
    return {"type": "FAILED", "name": "Refused", "message": redact(str(error))}
