"""Write what Prefect's pages show of the runs: the overview and a page for each run.

An artifact is created once and then changed in place: a new version adds about ten kilobytes to
Prefect's database, and a change adds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.base.errors import ServerDownError
from lachesis.base.files import read_last_lines
from lachesis.monitor.artifacts import escape_cell, format_value, render_table
from lachesis.monitor.curve_images import render_held_out_curve, render_reward_curve
from lachesis.prefect_client.background_serve import get_deployment_name
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.submit import get_run_url
from lachesis.reporting.verdict_marks import choose_mark
from lachesis.runs.folder import RunDir, shorten_service_name
from lachesis.runs.held_out_results import HeldOutPoint, build_held_out_curve
from lachesis.runs.metrics import KEY_METRICS, MetricsFile, Step, sample_history
from lachesis.runs.record import RunRecord, describe_service_state

if TYPE_CHECKING:
    from lachesis.monitor.tick import WatchedRun


TAIL_LINES, MAX_HELD_OUT_ROWS = 8, 12


def render_report(watched: WatchedRun, steps: Sequence[Step]) -> str:
    """Return the report of a run as Markdown: health, learning curve, last numbers, and log
    tails.
    """
    record = watched.record
    lines = [
        f"# {escape_cell(record.environment)}, run {record.run_id}: {record.status}",
        "",
        f"**{_format_headline(watched)}**",
        "",
    ]
    lines += [f"- {escape_cell(sentence)}" for sentence in watched.health.evidence]
    lines += [f"- advice: {escape_cell(sentence)}" for sentence in watched.health.advice]
    if record.error:
        lines += ["", f"> {escape_cell(record.error)}"]
    rewards = {
        step["step"]: step["reward/mean"] for step in steps if step.get("reward/mean") is not None
    }
    if len(rewards) > 1:
        curve = render_reward_curve(list(rewards), list(rewards.values()))
        lines += ["", "## Reward", "", curve]
    lines += _render_held_out(record, watched.observation.run_dir, steps)
    last_step = steps[-1] if steps else {}
    metric_rows = [
        [name, last_step[name]] for name in KEY_METRICS if last_step.get(name) is not None
    ]
    if metric_rows:
        title = f"## Step {last_step['step']} of {record.total_steps}"
        lines += ["", title, "", *render_table(["metric", "value"], metric_rows)]
    if watched.budget_shares:
        rows = [[name, f"{share:.1%}"] for name, share in watched.budget_shares.items()]
        lines += ["", "## Budget", "", *render_table(["of", "used"], rows)]
    lines += ["", format_wandb_line(watched)]
    for service in record.services:
        lines += _render_log_tail(watched, service)
    return "\n".join(lines)


def _render_log_tail(watched: WatchedRun, service: str) -> list[str]:
    observation = watched.observation
    log_file = observation.run_dir.get_log_file(service)
    # A log that holds three backticks would end the code block.
    log_tail = read_last_lines(log_file, TAIL_LINES).replace("```", "'''")
    title = f"### {shorten_service_name(service)}: {observation.process_states.get(service, '')}"
    return ["", title, "", "```text", log_tail[-3000:], "```"]


def _render_held_out(record: RunRecord, run_dir: RunDir, steps: Sequence[Step]) -> list[str]:
    """Return the held-out results by step, the newest ones as a table."""
    points = build_held_out_curve(steps)
    if not points:
        return []
    rows = [
        [point.step, f"{point.percent_correct:.3f}", point.items, _format_interval(point)]
        for point in points[-MAX_HELD_OUT_ROWS:]
    ]
    if len(points) > 1:
        curve = render_held_out_curve(
            [point.step for point in points],
            [point.percent_correct for point in points],
            [
                None if point.low is None or point.high is None else (point.low, point.high)
                for point in points
            ],
        )
        curve_lines = [curve, ""]
    else:
        curve_lines = []
    return [
        "",
        "## Held-out results",
        "",
        *curve_lines,
        *render_table(["step", "share correct", "items", "95 % interval"], rows),
    ]


def _format_interval(point: HeldOutPoint) -> str:
    if point.low is None or point.high is None:
        return ""
    return f"{point.low:.3f} to {point.high:.3f}"


def format_wandb_line(watched: WatchedRun) -> str:
    """Return a sentence about where the run's metrics are in W&B."""
    record = watched.record
    if record.wandb_url:
        return f"[W&B]({record.wandb_url})"
    offline = sorted((watched.observation.run_dir.path / "wandb").glob("offline-run-*"))
    if offline:
        return f"W&B was offline; `wandb sync {offline[-1]}` sends it."
    return "No W&B."


def _format_headline(watched: WatchedRun) -> str:
    if watched.stall:
        part, evidence = escape_cell(watched.stall.part), escape_cell(watched.stall.evidence)
        return f"Stalled in {part} since {watched.stall.since}: {evidence}"
    return f"Learning: {watched.health.word}. Phase: {escape_cell(watched.record.phase)}"


def build_status_rows(watched: WatchedRun) -> list[dict[str, Any]]:
    """Return one table row per process of the run, and one for the run itself."""
    record, observation = watched.record, watched.observation
    waiting_for = (observation.trainer_health or {}).get("waiting_for", "")
    run_row = {
        "what": "run",
        "state": record.status,
        "process": record.flow_pid,
        "detail": f"{record.phase}; waiting for {waiting_for}" if waiting_for else record.phase,
    }
    return [run_row] + [
        {
            "what": shorten_service_name(name),
            "state": describe_service_state(service.state, record.status),
            "process": service.pid,
            # A process that has ended is gone, which its state says already.
            "detail": "" if record.has_ended else observation.process_states.get(name, ""),
        }
        for name, service in record.services.items()
    ]


def build_overview_row(record: RunRecord) -> dict[str, Any]:
    """Return the row of a run in the overview, made from its record alone."""
    health = record.health or {}
    if not record.has_ended:
        stall = (health.get("stalled") or {}).get("part", "")
    else:
        stall = ""
    return {
        "run": record.run_id,
        "environment": record.environment,
        "status": record.status,
        "phase": record.phase,
        "step": f"{health['step']} of {record.total_steps}" if health.get("step") else "",
        "reward": health.get("reward"),
        "held out": health.get("held_out"),
        "verdict": choose_mark(record).word,
        "evidence": record.evidence or "",
        "stalled in": stall,
        "page": get_run_url(record) or "",
    }


# The columns of the overview after the run, which links to the page of its flow run; few, because
# the newer of Prefect's pages are narrow.
OVERVIEW_COLUMNS = ("environment", "status", "step", "reward", "held out", "verdict")


def render_overview(records: Sequence[RunRecord]) -> str:
    """Return the table of runs as Markdown, the first column with links to their pages."""
    if not records:
        return "No runs yet."
    lines = [f"| run | {' | '.join(OVERVIEW_COLUMNS)} |", f"|---|{'---|' * len(OVERVIEW_COLUMNS)}"]
    for record in records:
        row = build_overview_row(record)
        title = escape_cell(record.title)
        if row["page"]:
            title = f"[{title}]({row['page']})"
        if row["stalled in"]:
            row["status"] += f", stalled in {row['stalled in']}"
        if row["evidence"]:
            row["verdict"] = f"{row['verdict']}: {row['evidence']}"
        cells = [escape_cell(format_value(row[column])) for column in OVERVIEW_COLUMNS]
        lines.append(f"| {' | '.join([title, *cells])} |")
    return "\n".join(lines)


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
        report = render_report(watched, _select_curve_steps(steps))
        rows = build_status_rows(watched)
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
            data=render_overview(newest),
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
