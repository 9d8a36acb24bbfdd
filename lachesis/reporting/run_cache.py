"""Cache the files of a home's runs for programs that read them again and again.

What was read from a file is kept until the file changes, so that a list of a thousand runs costs
a look at each file's time and size. Nothing is written, except what any command that shows a run
writes: the end and the judgement of a run that ended unseen.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lachesis.reporting.run_summary import RunSummary, summarize_run
from lachesis.reporting.run_view import RunView
from lachesis.rollouts.groups import GroupTable, read_group_table
from lachesis.rollouts.parquet_files import list_rollout_files
from lachesis.runs.metric_samples import read_metric_samples
from lachesis.runs.metrics import MetricsReader, Step
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore

# Seconds between two refreshments of the records.
REFRESH_S = 10.0
# Runs whose steps are kept in memory; one of 2,500 steps takes some 20 MB.
MAX_KEPT_STEPS = 16
# Runs whose groups of rollouts are kept likewise.
MAX_KEPT_TABLES = 8
FileState = tuple[int, int]
T = TypeVar("T")


class RunCache:
    """Cache the records, metrics and rollouts of one home's runs.

    Args:
        store: The runs.
        refresh: Brings their records up to date; it is called at most once in `REFRESH_S`.
    """

    def __init__(self, store: RunStore, refresh: Callable[[], None] = lambda: None) -> None:
        self.store, self._refresh = store, refresh
        self._readers: dict[str, MetricsReader] = {}
        self._values: dict[tuple[str, str], tuple[object, Any]] = {}
        self._refreshed_at = -REFRESH_S
        self._lock = threading.Lock()

    def list_records(self) -> list[RunRecord]:
        """Return the records of all runs, the newest first; damaged ones are left out."""
        self._refresh_if_due()
        return self.store.all()

    def load_record(self, run_id: str) -> RunRecord:
        """Return the record of a run.

        Raises:
            UnknownRunError: There is no such run.
            StorageError: The record is damaged.
        """
        self._refresh_if_due()
        return self.store.load(run_id)

    def summarize(self, record: RunRecord) -> RunSummary:
        """Return the summary of a run."""
        run_dir = self.store.dir(record.run_id)
        state = (record, stat_file(run_dir.metrics), stat_file(run_dir.find_effective_config()))
        return self._keep("summary", record.run_id, state, lambda: summarize_run(record, run_dir))

    def view(self, run_id: str) -> RunView:
        """Return the view of a run.

        Raises:
            UnknownRunError: There is no such run.
            StorageError: Its record is damaged.
        """
        return RunView(self.load_record(run_id), self.store.dir(run_id), self.read_steps(run_id))

    def read_reward_samples(self, run_id: str, last_step: int) -> list[tuple[int, float]]:
        """Return mean rewards of some steps until the last step that counts, in order.

        There is none where they cannot be read.
        """

        def read() -> list[tuple[int, float]]:
            try:
                return read_metric_samples(metrics, "reward/mean")
            except OSError:
                return []

        metrics = self.store.dir(run_id).metrics
        samples = self._keep("reward", run_id, stat_file(metrics), read)
        return [(step, reward) for step, reward in samples if step <= last_step]

    def read_group_table(self, run_id: str, text: str = "") -> GroupTable:
        """Return a line per group of the run's rollouts, or per group that contains a string.

        Raises:
            StorageError: The rollouts cannot be read.
        """
        folder = self.store.dir(run_id).rollouts
        state = (text, list_rollout_files(folder))
        table: GroupTable = self._keep(
            "groups", run_id, state, lambda: read_group_table(folder, text)
        )
        with self._lock:
            keys = [key for key in self._values if key[0] == "groups"]
            for key in keys[:-MAX_KEPT_TABLES]:
                del self._values[key]
        return table

    def read_steps(self, run_id: str) -> list[Step]:
        """Return the metrics of every step of a run; no steps where they cannot be read.

        Of a file that has grown only the new lines are parsed.
        """
        with self._lock:
            reader = self._readers.pop(run_id, None)
            # The run that was asked for last is kept longest.
            self._readers[run_id] = reader or MetricsReader(self.store.dir(run_id).metrics)
            while len(self._readers) > MAX_KEPT_STEPS:
                self._readers.pop(next(iter(self._readers)))
            reader = self._readers[run_id]
        try:
            return reader.read()
        except OSError:
            return []

    def _refresh_if_due(self) -> None:
        """Bring the records of the home up to date if that was done too long ago."""
        # Pages are made in several threads; one of them asks, and the others do not wait for it.
        with self._lock:
            if time.monotonic() - self._refreshed_at < REFRESH_S:
                return
            self._refreshed_at = time.monotonic()
        self._refresh()

    def _keep(self, kind: str, run_id: str, state: object, read: Callable[[], T]) -> T:
        """Return the cached value if its files are in the same state, else read it."""
        kept = self._values.get((kind, run_id))
        if kept is not None and kept[0] == state:
            value: T = kept[1]
            return value
        value = read()
        with self._lock:
            self._values[kind, run_id] = (state, value)
        return value


def stat_file(file: Path) -> FileState | None:
    """Return the time and size of a file, or None if it does not exist."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
