"""Match flow runs with runs and tests, by the key that a flow run was submitted with.

The key names the run and its attempt, so nothing is searched, and a flow run that comes late is
known. A flow run that was started in Prefect has no such key; the id of its run follows from its
own.
"""

import hashlib
import itertools
import re

from lachesis.base.errors import RunStateError, ServerDownError
from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore

SUBMISSION_KEY = re.compile(r"([0-9a-f]{8})-([0-9]+)")


def is_submission_key(key: str) -> bool:
    """Return whether a key names an attempt of a run."""
    return SUBMISSION_KEY.fullmatch(key) is not None


def choose_run_id(store: RunStore, given_id: str, flow_run_id: str | None) -> str:
    """Return the id of the run that a flow run performs, whether that exists or not.

    The key of a submitted flow run names it. Any other flow run has a run of its own, also if it
    was copied in Prefect with the parameter `run_id` of another run.

    Args:
        store: The runs of this home.
        given_id: The parameter `run_id`, which is believed where Prefect cannot be asked.
        flow_run_id: The flow run, or None outside of Prefect.

    Raises:
        RunStateError: The flow run resumes a run that is not in this home.
    """
    if flow_run_id is None:
        return given_id or store.new_id()
    key = _read_key(flow_run_id)
    if key is None and given_id:
        return given_id
    submission = SUBMISSION_KEY.fullmatch(key or "")
    if submission is None:
        return derive_run_id(store, flow_run_id)
    run_id, attempt = submission.groups()
    if attempt != "1" and not store.dir(run_id).record.is_file():
        raise RunStateError(
            f"attempt {attempt} of run {run_id} cannot begin: the run is not in {store.root}; it "
            "was removed, or belongs to another home"
        )
    return run_id


def derive_run_id(store: RunStore, flow_run_id: str) -> str:
    """Return the id of the run of a flow run that was started in Prefect; it is always the same.

    It is the beginning of a hash. Where that is the id of another run, the next hash is taken.
    """
    for number in itertools.count():
        run_id = hashlib.sha256(f"{flow_run_id}/{number}".encode()).hexdigest()[:8]
        if not store.dir(run_id).record.is_file():
            return run_id
        if store.load(run_id).made_for_flow_run_id == flow_run_id:
            return run_id
    raise AssertionError("there is always a next number")


def require_free_run(store: RunStore, record: RunRecord, flow_run_id: str | None) -> None:
    """Check that a flow run performs the run's attempt, which may begin, now or again.

    Raises:
        RunStateError: The run is at another attempt, as when an earlier flow run is retried, or
            has ended before it was known that Prefect had accepted it.
    """
    if record.has_ended and record.flow_run_id is None:
        raise RunStateError(
            f"run {record.run_id} was {record.status} before it began; `lachesis resume "
            f"{record.run_id}` starts it"
        )
    if belongs_to_attempt(record, flow_run_id):
        return
    if record.has_ended:
        next_step = f"`lachesis resume {record.run_id}` continues it"
    else:
        next_step = f"`lachesis stop {record.run_id}` ends it"
    raise RunStateError(
        f"this flow run has made an earlier attempt of run {record.run_id}, which is "
        f"{record.status} at attempt {record.attempt} as flow run {record.flow_run_id}; {next_step}"
    )


def belongs_to_attempt(record: RunRecord, flow_run_id: str | None) -> bool:
    """Return whether a flow run performs the run's current attempt.

    If Prefect cannot be asked about the flow run, it is assumed to do so.
    """
    return flow_run_id == record.flow_run_id or is_own_submission(
        flow_run_id, record.submission_key
    )


def is_own_submission(flow_run_id: str | None, key: str) -> bool:
    """Return whether a flow run has this key, assumed where Prefect does not answer."""
    if flow_run_id is None:
        return True
    return _read_key(flow_run_id) in (None, key)


def _read_key(flow_run_id: str) -> str | None:
    """Return a flow run's key, empty for none; None if Prefect does not respond."""
    try:
        flow_run = PrefectApi().read_flow_run(flow_run_id) or {}
    except ServerDownError:
        return None
    return str(flow_run.get("idempotency_key") or "")
