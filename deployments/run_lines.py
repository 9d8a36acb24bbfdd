"""Print a line when a run of the home starts or ends, for the person who watches the launcher."""

import contextlib
import time
from datetime import datetime
from pathlib import Path

from lachesis.base.formatting import format_reward, show_controls
from lachesis.prefect_client.submit import get_run_url
from lachesis.reporting.run_summary import summarize_run
from lachesis.runs.held_out_results import describe_share
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore

# Seconds between two looks at the records.
LOOK_INTERVAL_S = 2.0
# A status for which a line is printed; a run is starting and stopping for moments only.
TOLD_STATUSES = frozenset({"running", "completed", "failed", "stopped"})


class RunLines:
    """Notice when the status of a run changes."""

    def __init__(self, home: Path) -> None:
        self.store = RunStore(home)
        self._looked_at = 0.0
        self._statuses: dict[str, str] = {}
        # What is there at the start is not news.
        self.list_changes()

    def print_changes(self) -> None:
        """Print a line for each run whose status has changed since the last look.

        A record that cannot be read is left out, and a line that cannot be written is lost: neither
        may end the launcher, and all runs with it.
        """
        if time.monotonic() - self._looked_at < LOOK_INTERVAL_S:
            return
        for record in self.list_changes():
            # The output may be a log on a full disk, or a terminal that is gone.
            with contextlib.suppress(Exception):
                now = datetime.now().strftime("%H:%M:%S")
                print(show_controls(f"{now}  {self.describe(record)}"), flush=True)

    def list_changes(self) -> list[RunRecord]:
        """Return the records of the runs that have another status than at the last look."""
        self._looked_at = time.monotonic()
        changed = []
        with contextlib.suppress(Exception):
            for record in self.store.all():
                if self._statuses.get(record.run_id) != record.status:
                    self._statuses[record.run_id] = record.status
                    if record.status in TOLD_STATUSES:
                        changed.append(record)
        return changed

    def describe(self, record: RunRecord) -> str:
        """Return one line about the change of a run, with the command to look at it."""
        name = f"run {record.run_id} ({record.name or record.environment})"
        match record.status:
            case "running":
                return f"{name} trains: {get_run_url(record) or 'lachesis watch ' + record.run_id}"
            case "completed":
                return f"{name} has completed{self._describe_results(record)}"
            case "failed":
                cause = (record.error or "").strip().split("\n")[0]
                return f"{name} has failed: {cause}; `lachesis logs {record.run_id}`"
            case _:
                reason = f": {record.error}" if record.error else ""
                return f"{name} was stopped{reason}; `lachesis resume {record.run_id}` continues"

    def _describe_results(self, record: RunRecord) -> str:
        """Return rewards and held-out result of an ended run as the end of a line, or nothing."""
        summary = summarize_run(record, self.store.dir(record.run_id))
        parts = []
        if summary.reward:
            first, last = map(format_reward, (summary.reward["first"], summary.reward["last"]))
            parts.append(f"reward {first} → {last}")
        if summary.held_out:
            parts.append(f"held out {describe_share(summary.held_out)}")
        return f": {', '.join(parts)}" if parts else ""
