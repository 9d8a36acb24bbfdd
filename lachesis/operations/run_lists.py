"""List the runs of a home, for all surfaces."""

import logging

from lachesis.base.errors import LachesisError
from lachesis.prefect_client import refresh
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore

log = logging.getLogger(__name__)
# Newest runs of a list whose judgement is refreshed when it is out of date.
MAX_JUDGED_RUNS = 50


def list_runs(store: RunStore) -> list[RunRecord]:
    """Return all runs, the newest first."""
    return list_runs_with_warning(store)[0]


def list_runs_with_warning(store: RunStore) -> tuple[list[RunRecord], str | None]:
    """Return all runs, newest first, and why their statuses may be old, or None."""
    records, unreadable = store.scan()
    observed_records, warning = refresh.refresh_runs(store, records)
    damage_warning = (
        unreadable
        and f"the records of these runs cannot be read: {', '.join(unreadable[:10])}; see "
        f"{store.root}"
    )
    judged_records = [judge_run(store, record) for record in observed_records[:MAX_JUDGED_RUNS]]
    return [*judged_records, *observed_records[MAX_JUDGED_RUNS:]], "; ".join(
        text for text in (warning, damage_warning) if text
    ) or None


def refresh_unsettled(store: RunStore) -> None:
    """Ask the Prefect server about the runs that have not ended, and judge those that have.

    Nothing is raised: what was known before is then still shown.
    """
    try:
        records = store.all()
        refresh.refresh_runs(store, [record for record in records if not record.has_ended])
        unjudged = [record for record in store.all() if record.has_ended]
        unjudged = [record for record in unjudged if not record.has_final_judgement]
        for record in unjudged[:MAX_JUDGED_RUNS]:
            judge_run(store, record)
    except (LachesisError, OSError) as error:
        log.warning("the states of the runs are not refreshed: %s", error)


def judge_run(store: RunStore, record: RunRecord) -> RunRecord:
    """Return the record with a judgement that is up to date."""
    if record.has_final_judgement:
        return record
    # Loaded here: most lists need it for no run, and would take a third longer.
    from lachesis.monitor.run_health import refresh_health

    return refresh_health(store, record)
