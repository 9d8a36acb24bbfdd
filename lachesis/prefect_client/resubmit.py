"""Continue an ended run: make its next attempt, and submit that to Prefect."""

from lachesis.base.errors import LachesisError
from lachesis.config.run_config import RunConfig
from lachesis.launch.resume import begin_next_attempt, undo_attempt
from lachesis.prefect_client import submit
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore


def resubmit_run(
    store: RunStore,
    record: RunRecord,
    config: RunConfig | None = None,
    *,
    by_owner: bool = True,
    **changes: object,
) -> RunRecord:
    """Continue an ended run from its newest checkpoint, as a new attempt.

    Of several calls at once one makes the attempt, and all have its run.

    Args:
        store: The runs of this home.
        record: The run.
        config: The configuration of the new attempt, if it is not that of the last one.
        by_owner: Whether the owner of this installation resumes it; see `begin_next_attempt`.
        changes: What changes in its record besides.

    Raises:
        LachesisError: The run is then as it was.
    """
    queued_record, former_fields = begin_next_attempt(
        store, record, changes, config, by_owner=by_owner
    )
    if not former_fields:
        return queued_record
    try:
        return submit.submit_run(store, queued_record)
    except LachesisError:
        undo_attempt(store, queued_record, former_fields)
        raise
