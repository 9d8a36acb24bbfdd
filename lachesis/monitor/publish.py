"""What a tick shows in the Prefect UI: per run a report, a table and its progress, and one overview of all runs.

Each is made once and then changed in place: a new version of an artifact costs the database ten kilobytes, a change none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.base.errors import ServerDownError
from lachesis.base.files import write_private
from lachesis.monitor import text
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.runs.metrics import MetricsFile, Step, sample_history
from lachesis.runs.store import RunRecord

if TYPE_CHECKING:
    from lachesis.monitor.tick import Watched

Json = dict[str, Any]
MOST_S = 2.5
"""Seconds that one tick spends on publishing; runs that find no place are the first of the next tick."""
MOST_POINTS = 200
MOST_ROWS = 200


class Publisher:
    def __init__(self, home: Path) -> None:
        self.home = home

    def publish(self, seen: Sequence[Watched], records: Sequence[RunRecord]) -> int:
        """The overview, then the runs whose report is oldest; how many of them. Raises LachesisError."""
        until, done = time.monotonic() + MOST_S, 0
        with PrefectApi().reuse_connection() as api:
            self._overview(api, seen, records)
            for one in sorted(seen, key=lambda one: (not one.said, one.memory.published_at)):
                if time.monotonic() > until and not one.record.has_ended:
                    continue
                if one.record.flow_run_id is not None:
                    one.memory.published_at = time.time()  # before it: one that cannot be published lets the others go first
                    done += self._published(api, one)
        return done

    def _published(self, api: PrefectApi, seen: Watched) -> bool:
        """Whether it could be; what is wrong with one run keeps the others from nothing. Raises ServerDownError."""
        try:
            self.publish_run(api, seen)
        except ServerDownError:
            raise
        except Exception as error:
            seen.said.append(f"not published: {error}")
            return False
        return True

    def publish_run(self, api: PrefectApi, seen: Watched) -> None:
        """Report, table and progress of one run. Raises ServerDownError."""
        record, steps = seen.record, MetricsFile(seen.look.folder.metrics).read()
        done = steps[-1]["step"] if steps else 0
        content: dict[str, tuple[str, Any, str]] = {
            "report": ("markdown", text.report(seen, _shown(steps)), "How the run learns, and its last words"),
            "status": ("table", text.status_rows(seen), "The run's processes"),
            "progress": ("progress", min(100.0, round(100 * done / record.total_steps, 1)), "Training steps"),
        }
        for name, (kind, data, what) in content.items():
            known = seen.memory.artifacts.get(name)
            seen.memory.artifacts[name] = api.upsert_artifact(
                record.flow_run_id,
                key=f"{name}-{record.run_id}",
                kind=kind,
                data=data,
                description=f"{what}: {record.environment}, run {record.run_id}",
                artifact_id=known,
            )
        seen.published = True

    def _overview(self, api: PrefectApi, seen: Sequence[Watched], records: Sequence[RunRecord]) -> None:
        file = self.home / "monitor.json"
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError):
            found = None
        known = found if isinstance(found, dict) else {}
        fresh = {one.record.run_id: one.record for one in seen}
        rows = [text.overview_row(fresh.get(record.run_id, record)) for record in records[:MOST_ROWS]]
        made = api.upsert_artifact(None, key="lachesis-runs", kind="table", data=rows, description="All runs", artifact_id=known.get(api.url))
        if known.get(api.url) != made:
            write_private(file, json.dumps({api.url: made}))


def _shown(steps: Sequence[Step]) -> list[Step]:
    """Return steps for the curves of a page: evenly spread ones, and all with a held-out result."""
    spread = {step["step"] for step in sample_history(list(steps), MOST_POINTS)}
    return [step for step in steps if step["step"] in spread or "eval/step" in step]
