"""Look at runs, stop, resume, edit and remove them, for all surfaces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lachesis.base.errors import ConfigError, shorten
from lachesis.base.files import read_last_lines, write_private
from lachesis.base.json_text import Json
from lachesis.base.waiting import wait_until
from lachesis.config.field_edits import get_editable_values
from lachesis.launch.resume import prepare_resume
from lachesis.operations.run_lists import judge_run
from lachesis.prefect_client import background_serve, refresh, stop
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.resubmit import resubmit_run
from lachesis.prefect_client.stop import wait_until_gone
from lachesis.prefect_client.submit import find_queue_position, get_run_url
from lachesis.reporting.next_steps import NEXT_STEP_COMMANDS
from lachesis.reporting.run_schemas import (
    RunResults,
    RunStatus,
    build_run_results,
    build_run_status,
)
from lachesis.reporting.run_view import RunView, find_log_files
from lachesis.runs.end_causes import EndCause
from lachesis.runs.ending import end_run, has_crashed, is_lost_elsewhere
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.names_and_tags import edit_labels
from lachesis.runs.record import RunRecord
from lachesis.runs.removal import measure_run, remove_run, require_removable
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.spending.ledger import settle_run

__all__ = ["edit_labels", "find_queue_position", "get_run_url", "wait_until_gone"]
# How long a caller waits for the end of a run that saves a checkpoint.
STOP_TIMEOUT_S = 60.0


def get_run(store: RunStore, run_id: str) -> RunRecord:
    """Return the record of a run with the status that the server reports."""
    return refresh.refresh_run(store, store.load(run_id))


def view_run(store: RunStore, run_id: str) -> RunView:
    """Return a view of a run, up to date with its server and its last judgement."""
    return observe_run(store, run_id).view


@dataclass(frozen=True)
class ObservedRun:
    """Hold a view of a run, with its page and its place in the queue of the Prefect server."""

    view: RunView
    ui_url: str | None
    """Its page in Prefect."""
    queue: Mapping[str, int] | None
    """Its place in the queue of this host, if it waits there."""
    warning: str | None
    """What prevents the report from being up to date."""

    @property
    def phase(self) -> str:
        """Return the present activity of the run, in words."""
        if self.queue:
            return f"waiting for place {self.queue['place']} in the queue"
        return self.view.record.phase


def observe_run(store: RunStore, run_id: str) -> ObservedRun:
    """Return a run as its files and the Prefect server describe it now."""
    observed_records, warning = refresh.refresh_runs(store, [store.load(run_id)])
    record = judge_run(store, observed_records[0])
    return ObservedRun(
        view=RunView(record, store.dir(run_id), read_metrics(store, run_id)),
        ui_url=get_run_url(record),
        queue=find_queue_position(record, store.home),
        warning=warning,
    )


def build_status(
    observed: ObservedRun, next_step_templates: Mapping[str, str] = NEXT_STEP_COMMANDS
) -> RunStatus:
    """Return the status of a run as data, with the next steps of the user interface."""
    return build_run_status(
        observed.view,
        phase=observed.phase,
        ui_url=observed.ui_url,
        queue=observed.queue,
        warning=observed.warning,
        next_step_templates=next_step_templates,
    )


def get_status(
    store: RunStore, run_id: str, next_step_templates: Mapping[str, str] = NEXT_STEP_COMMANDS
) -> RunStatus:
    """Return the status of a run as data; see `build_status`."""
    return build_status(observe_run(store, run_id), next_step_templates)


def get_results(
    store: RunStore, run_id: str, next_step_templates: Mapping[str, str] = NEXT_STEP_COMMANDS
) -> RunResults:
    """Return the results of the run, with the next steps of the user interface."""
    return build_run_results(view_run(store, run_id), next_step_templates=next_step_templates)


def read_metrics(store: RunStore, run_id: str) -> list[Json]:
    """Return the metrics of every step of the run."""
    store.load(run_id)
    return MetricsFile(store.dir(run_id).metrics).read()


def read_editable_values(store: RunStore, record: RunRecord) -> Json:
    """Return the values of the run's editable fields."""
    return get_editable_values(read_effective_config(store.dir(record.run_id)))


def read_log(store: RunStore, run_id: str, service: str, lines: int = 50) -> tuple[Path, str, int]:
    """Return a log file of the run, its last lines, and the position at which to continue reading.

    Raises:
        ConfigError: The run has no such process.
    """
    log_files = find_log_files(store.load(run_id), store.dir(run_id))
    if service not in log_files:
        raise ConfigError(
            f"run {run_id} has no process {shorten(repr(service), 60)}; allowed: "
            f"{', '.join(log_files)}"
        )
    path = Path(log_files[service])
    position = path.stat().st_size if path.exists() else 0
    return path, read_last_lines(path, lines), position


def resume_run(
    store: RunStore, run_id: str, changes: Json | None = None, *, by_owner: bool = False
) -> RunRecord:
    """Resume an ended run from its newest complete checkpoint; a run that has not ended is
    returned.

    Args:
        store: The runs of the home.
        run_id: The run.
        changes: New values of its budgets and of `total_steps`. Without them, a budget that is used
            up would end the run again at once, so such a run is refused.
        by_owner: Whether the owner of this installation resumes it, and no agent.
    """
    record = get_run(store, run_id)
    if not record.has_ended:
        return record
    record_changes, config = prepare_resume(
        store, record, changes, background_serve.read_key_names(), by_owner=by_owner
    )
    PrefectApi()  # raises when no server is known, before anything is changed
    return resubmit_run(store, record, config, by_owner=by_owner, auto_resumes=0, **record_changes)


def stop_run(store: RunStore, run_id: str, *, now: bool = False, by_agent: bool = False) -> Json:
    """Ask the run to save a checkpoint and end, and return at once.

    Args:
        store: The runs of the home.
        run_id: The run.
        now: Whether its processes are ended without a checkpoint, which also ends a stop that takes
            too long.
        by_agent: Whether an agent asks, and no person.
    """
    record = get_run(store, run_id)
    # Otherwise the monitor would resume it.
    if record.resume_requested or has_crashed(record):
        store.update(run_id, resume_requested=False, is_end_handled=record.has_ended)
    if is_lost_elsewhere(store.dir(run_id), record):
        record = end_run(
            store, record, EndCause.HOST_LOST, f"it was begun on {record.host_name}, and ended here"
        )
    if record.has_ended:
        return _answer(record, "is not running and will not be resumed")
    if now:
        write_private(store.dir(run_id).stop_now_file, "")
    stop.cancel_run(store, record, EndCause.AGENT if by_agent else EndCause.PERSON)
    record = get_run(store, run_id)
    # A short run may end meanwhile, and by itself.
    return _answer(record, f"is {record.status}" if record.has_ended else "is being stopped")


def _answer(record: RunRecord, state: str) -> Json:
    message = f"run {record.run_id} {state}"
    return {"message": message, "run_id": record.run_id, "status": record.status}


def wait_for_end(store: RunStore, run_id: str, timeout_s: float = STOP_TIMEOUT_S) -> RunRecord:
    """Return the record of a run after waiting for its end, at most this long."""
    wait_until(lambda: get_run(store, run_id).has_ended, timeout_s)
    return get_run(store, run_id)


def require_all_removable(store: RunStore, run_ids: Sequence[str]) -> dict[str, int]:
    """Return the bytes of all files of each run, which can all be removed.

    Raises:
        RunStateError: One of them is alive.
    """
    for run_id in run_ids:
        require_removable(store, get_run(store, run_id))
    return {run_id: measure_run(store, run_id) for run_id in run_ids}


def remove_runs(store: RunStore, run_ids: Sequence[str]) -> None:
    """Remove ended runs with all their files; their cost stays in the ledger."""
    for run_id in run_ids:
        record = get_run(store, run_id)
        require_removable(store, record)
        settle_run(store, record)
        remove_run(store, record)
