"""Render what a run shows in the Prefect UI: its report, its tables and its row in the overview."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lachesis.base.files import read_last_lines
from lachesis.monitor.artifacts import escape_cell, format_value, render_table
from lachesis.monitor.curve_images import render_held_out_curve, render_reward_curve
from lachesis.prefect_client.submit import get_run_url
from lachesis.runs.folder import RunDir, shorten_service_name
from lachesis.runs.held_out_results import HeldOutPoint, build_run_curve
from lachesis.runs.metrics import KEY_METRICS, Step
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
    points = build_run_curve(record, run_dir, steps)
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
        "learning": record.learning,
        "evidence": record.evidence or "",
        "stalled in": stall,
        "page": get_run_url(record) or "",
    }


# The columns of the overview after the run, which links to the page of its flow run; few, because
# the newer of Prefect's pages are narrow.
OVERVIEW_COLUMNS = ("environment", "status", "step", "reward", "held out", "learning")


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
            row["learning"] = f"{row['learning']}: {row['evidence']}"
        cells = [escape_cell(format_value(row[column])) for column in OVERVIEW_COLUMNS]
        lines.append(f"| {' | '.join([title, *cells])} |")
    return "\n".join(lines)
