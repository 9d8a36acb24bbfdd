"""Remove ended runs with all their files."""

import shutil
from pathlib import Path

from lachesis.base.errors import RunStateError
from lachesis.base.files import storage_errors
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore


def require_removable(store: RunStore, record: RunRecord) -> None:
    """Check that a run has ended and that none of its processes is left.

    Raises:
        RunStateError: The run is alive.
    """
    if record.has_ended and not store.dir(record.run_id).is_alive():
        return
    if record.has_ended:
        problem = "has ended, but processes of it are still being ended; try again in a minute"
    else:
        problem = f"is {record.status}; `lachesis stop {record.run_id}` ends it"
    raise RunStateError(f"run {record.run_id} cannot be removed: it {problem}")


def measure_run(store: RunStore, run_id: str) -> int:
    """Return the bytes of all files of a run."""
    # Links are not followed: what they point to is not removed.
    return sum(_get_size(file) for file in store.dir(run_id).path.rglob("*"))


def _get_size(file: Path) -> int:
    try:
        if file.is_file() and not file.is_symlink():
            return file.stat().st_size
    except OSError:  # It was removed meanwhile.
        pass
    return 0


def remove_run(store: RunStore, record: RunRecord) -> None:
    """Remove a run with its checkpoints, weights, metrics and logs.

    Its flow runs stay in Prefect, and runs that were started from its checkpoints keep their own
    copies.

    Raises:
        RunStateError: The run is alive.
        StorageError: A file cannot be removed.
    """
    # Without its record the folder is no run any more, whatever happens to the rest.
    store.delete_record(record.run_id, lambda newest: require_removable(store, newest))
    folder = store.dir(record.run_id).path
    with storage_errors(folder):
        shutil.rmtree(folder)
