"""Publish a tick's results to the Prefect UI: a report, a table and progress per run, and an
overview.

Each artifact is created once and then changed in place. A new version of an artifact adds about ten
kilobytes to the database; a change adds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.base.errors import ServerDownError
from lachesis.monitor import artifact_content
from lachesis.prefect_client.background_serve import get_deployment_name
from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.metrics import MetricsFile, Step, sample_history
from lachesis.runs.record import RunRecord

if TYPE_CHECKING:
    from lachesis.monitor.tick import WatchedRun

# Seconds that one tick spends on publishing. Runs that do not fit come first in the next tick.
MAX_PUBLISH_S = 2.5
MAX_CURVE_POINTS = 200
MAX_OVERVIEW_ROWS = 200
OVERVIEW_KEY, OVERVIEW_KIND = "lachesis-runs", "markdown"


class Publisher:
    """Publishes the artifacts of one home."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def publish(self, watched_runs: Sequence[WatchedRun], records: Sequence[RunRecord]) -> int:
        """Publish the overview, then the runs whose report is oldest.

        Returns:
            The number of runs that were published.

        Raises:
            LachesisError: The Prefect server does not answer or refuses the overview.
        """
        deadline, num_published = time.monotonic() + MAX_PUBLISH_S, 0
        with PrefectApi().reuse_connection() as api:
            self._publish_overview(api, watched_runs, records)
            for watched in sorted(
                watched_runs,
                key=lambda watched: (not watched.messages, watched.memory.published_at),
            ):
                if time.monotonic() > deadline and not watched.record.has_ended:
                    continue
                if watched.record.flow_run_id is not None:
                    # set first, so that a run that cannot be published moves to the end of the
                    # queue
                    watched.memory.published_at = time.time()
                    num_published += self._try_publish_run(api, watched)
        return num_published

    def _try_publish_run(self, api: PrefectApi, watched: WatchedRun) -> bool:
        """Publish one run and return whether that worked; an error is added to the run's messages.

        Raises:
            ServerDownError: The Prefect server does not answer.
        """
        try:
            self.publish_run(api, watched)
        except ServerDownError:
            raise
        except Exception as error:
            watched.messages.append(f"not published: {error}")
            return False
        return True

    def publish_run(self, api: PrefectApi, watched: WatchedRun) -> None:
        """Publish the report, table and progress of one run.

        Raises:
            ServerDownError: The Prefect server does not answer.
        """
        record, steps = watched.record, MetricsFile(watched.observation.run_dir.metrics).read()
        steps_done = steps[-1]["step"] if steps else 0
        percent = min(100.0, round(100 * steps_done / record.total_steps, 1))
        report = artifact_content.render_report(watched, _select_curve_steps(steps))
        rows = artifact_content.build_status_rows(watched)
        content: list[tuple[str, str, Any, str]] = [
            ("report", "markdown", report, "How the run learns, and its last words"),
            ("status", "table", rows, "The run's processes"),
            ("progress", "progress", percent, "Training steps"),
        ]
        for name, kind, data, caption in content:
            artifact_id = watched.memory.artifacts.get(name)
            watched.memory.artifacts[name] = api.upsert_artifact(
                record.flow_run_id,
                key=f"{name}-{record.run_id}",
                kind=kind,
                data=data,
                description=f"{caption}: {record.environment}, run {record.run_id}",
                artifact_id=artifact_id,
            )
        watched.is_published = True

    def _publish_overview(
        self, api: PrefectApi, watched_runs: Sequence[WatchedRun], records: Sequence[RunRecord]
    ) -> None:
        fresh_records = {watched.record.run_id: watched.record for watched in watched_runs}
        newest = [
            fresh_records.get(record.run_id, record) for record in records[:MAX_OVERVIEW_ROWS]
        ]
        api.upsert_artifact(
            None,
            key=make_overview_key(self.home),
            kind=OVERVIEW_KIND,
            data=artifact_content.render_overview(newest),
            description="All runs",
        )


def make_overview_key(home: Path) -> str:
    """Return the key of the artifact that lists all runs of a home."""
    return get_deployment_name(OVERVIEW_KEY, home)


def _select_curve_steps(steps: Sequence[Step]) -> list[Step]:
    """Return the steps for the curves of a page: evenly spaced ones, and all with a held-out
    result.
    """
    spread_steps = {step["step"] for step in sample_history(list(steps), MAX_CURVE_POINTS)}
    return [step for step in steps if step["step"] in spread_steps or "eval/step" in step]
