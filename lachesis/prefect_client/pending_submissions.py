"""Send starts, resumes and tests again until it is known that Prefect has accepted them.

A record that is pending and names no flow run is such a submission; nothing else is kept of it. Its
key makes the server answer with the flow run that it has already, so whoever looks may send it: a
command, a tool, and the runner of `lachesis serve`. Only a refusal takes it back.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from lachesis.base.errors import LachesisError, ServerDownError
from lachesis.base.timestamps import seconds_between
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore
from lachesis.prefect_client.api_requests import was_refused
from lachesis.prefect_client.submit import submit_run, submit_test
from lachesis.runs.end_causes import EndCause
from lachesis.runs.ending import end_run, is_elsewhere
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore

log = logging.getLogger(__name__)
Record = TypeVar("Record", RunRecord, InferenceTest)
# Whoever submits may take this long by itself.
OWN_SUBMISSION_S = 25.0
# Nobody expects a start of an earlier day to begin; what it would cost was agreed to long ago.
MAX_PENDING_S = 86_400.0
NEVER_SUBMITTED = (
    "it was never submitted: no Prefect server has accepted it in a day; start it again"
)


def send_all(store: RunStore) -> None:
    """Send each pending submission of a home that nobody else is sending; no error is raised."""
    tests = InferenceTestStore(store.home)
    try:
        for record in store.all():
            send_run(store, record)
        for test in tests.all():
            send_test(tests, test)
    except LachesisError as error:
        log.warning("pending submissions were not sent: %s", error)
    except Exception:
        log.exception("pending submissions were not sent")


def send_run(store: RunStore, record: RunRecord) -> RunRecord:
    """Send a run again if it is a pending submission, and return its record.

    In a home that was copied to another host it is not sent a second time.
    """
    if record.status != "pending" or record.flow_run_id is not None or is_elsewhere(record):
        return record
    return _send(
        record,
        record.queued_at,
        submit=lambda: submit_run(store, record),
        fail=lambda reason: end_run(store, record, EndCause.NEVER_SUBMITTED, reason),
    )


def send_test(tests: InferenceTestStore, test: InferenceTest) -> InferenceTest:
    """Send a test again if it is a pending submission, and return it."""
    if test.status != "pending" or tests.read_flow_run_id(test.test_id) is not None:
        return test
    return _send(
        test,
        test.created_at,
        submit=lambda: submit_test(tests, test),
        fail=lambda reason: tests.fail(test.test_id, reason),
    )


def _send(
    pending: Record, queued_at: str, *, submit: Callable[[], Record], fail: Callable[[str], Record]
) -> Record:
    """Send a pending record and return its new state: sent, failed, or unchanged."""
    age_s = seconds_between(queued_at)
    if age_s > MAX_PENDING_S:
        return fail(NEVER_SUBMITTED)
    if age_s < OWN_SUBMISSION_S:
        return pending
    try:
        return submit()
    except ServerDownError as error:
        return fail(str(error)) if was_refused(error) else pending
