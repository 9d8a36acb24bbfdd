"""How a run looks in the Prefect UI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lachesis.base.files import read_last_lines
from lachesis.orchestration.artifacts import escape_cell, render_curve, render_table
from lachesis.orchestration.launcher import get_run_url
from lachesis.runs.held_out import HeldOutPoint, build_whole_curve
from lachesis.runs.metrics import KEY_METRICS, Step
from lachesis.runs.store import RunRecord, shorten_service_name

if TYPE_CHECKING:
    from lachesis.monitor.tick import Watched

TAIL_LINES, MAX_HELD_OUT = 8, 12


def report(seen: Watched, steps: Sequence[Step]) -> str:
    """Health first, then the curve, the last numbers, and the end of each log."""
    record, look = seen.record, seen.look
    lines = [f"# {escape_cell(record.environment)}, run {record.run_id}: {record.status}", "", f"**{_headline(seen)}**", ""]
    lines += [f"- {escape_cell(sentence)}" for sentence in seen.health.evidence]
    lines += [f"- advice: {escape_cell(sentence)}" for sentence in seen.health.advice]
    if record.error:
        lines += ["", f"> {escape_cell(record.error)}"]
    if len(steps) > 1:
        lines += ["", "## Reward", "", render_curve([one.get("reward/mean") for one in steps])]
    lines += _held_out(record, steps)
    last = steps[-1] if steps else {}
    known = [[name, last[name]] for name in KEY_METRICS if last.get(name) is not None]
    if known:
        lines += ["", f"## Step {last['step']} of {record.total_steps}", "", *render_table(["metric", "value"], known)]
    if seen.budget:
        rows = [[name, f"{share:.1%}"] for name, share in seen.budget.items()]
        lines += ["", "## Budget", "", *render_table(["of", "used"], rows)]
    lines += ["", wandb_line(seen)]
    for service in record.services:
        end = read_last_lines(look.folder.get_log_file(service), TAIL_LINES).replace("```", "'''")
        lines += ["", f"### {shorten_service_name(service)}: {look.states.get(service, '')}", "", "```text", end[-3000:], "```"]
    return "\n".join(lines)


def _held_out(record: RunRecord, steps: Sequence[Step]) -> list[str]:
    """Return the held-out results by step, the newest ones as a table."""
    points = build_whole_curve(steps, record.evaluation, is_from_base=False)
    if not points:
        return []
    rows = [[point.step, f"{point.percent_correct:.3f}", point.items, _interval(point)] for point in points[-MAX_HELD_OUT:]]
    picture = [render_curve([point.percent_correct for point in points]), ""] if len(points) > 1 else []
    return ["", "## Held-out results", "", *picture, *render_table(["step", "share correct", "items", "95 % interval"], rows)]


def _interval(point: HeldOutPoint) -> str:
    return "" if point.low is None or point.high is None else f"{point.low:.3f} to {point.high:.3f}"


def wandb_line(seen: Watched) -> str:
    record = seen.record
    if record.wandb_url:
        return f"[W&B]({record.wandb_url})"
    offline = sorted((seen.look.folder.path / "wandb").glob("offline-run-*"))
    return f"W&B was offline; `wandb sync {offline[-1]}` sends it." if offline else "No W&B."


def _headline(seen: Watched) -> str:
    if seen.stall:
        return f"Stalled in {escape_cell(seen.stall.part)} since {seen.stall.since}: {escape_cell(seen.stall.evidence)}"
    return f"Learning: {seen.health.word}. Phase: {escape_cell(seen.record.phase)}"


def status_rows(seen: Watched) -> list[dict[str, Any]]:
    """One row per process, and one for the run."""
    record, look = seen.record, seen.look
    waiting = (look.trainer or {}).get("waiting_for", "")
    first = {
        "what": "run",
        "state": record.status,
        "process": record.flow_pid,
        "detail": f"{record.phase}; waits for {waiting}",
    }
    return [first] + [
        {"what": shorten_service_name(name), "state": service.state, "process": service.pid, "detail": look.states.get(name, "")}
        for name, service in record.services.items()
    ]


def overview_row(record: RunRecord) -> dict[str, Any]:
    """From the record alone: what a tick finds is in its health."""
    health = record.health or {}
    stall = (health.get("stalled") or {}).get("part", "") if not record.has_ended else ""
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
