"""Write the report of a run: its page with its rollouts, as one file that needs no server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.base.errors import StorageError
from lachesis.base.json_text import read_json_lines
from lachesis.reporting.held_out_answers import read_held_out_groups
from lachesis.reporting.recorded_curves import record_curves
from lachesis.reporting.rollout_answers import AnswerColumn, build_answers, read_item_facts
from lachesis.reporting.run_schemas import RunResults
from lachesis.reporting.run_summary import summarize_run
from lachesis.reporting.trouble import find_first_bad_step
from lachesis.rollouts.groups import GroupQuery, GroupTable, read_group, read_group_table
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import describe_evaluation_faults
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.web.html import list_forecast, list_held_out_results, list_provenance
from lachesis.web.report_assets import write_report_file
from lachesis.web.rollout_page import describe_scores
from lachesis.web.run_overview import make_run_page

# Held-out items that are shown, those with wrong answers first.
MAX_HELD_OUT_ITEMS = 4
PHASES = ("The beginning", "The middle", "The end")


@dataclass(frozen=True)
class ReportedGroup:
    """Hold one group of answers."""

    title: str
    prompt: str
    expected: str | None
    answers: list[AnswerColumn]
    summary: str


@dataclass(frozen=True)
class ReportedPhase:
    """Hold the groups of a part of the run."""

    title: str
    groups: list[ReportedGroup]


@dataclass(frozen=True)
class RunReport:
    """Hold what the report has and the page has not."""

    held_out_rows: list[list[Any]]
    failures: str
    phases: list[ReportedPhase]
    forecast_rows: list[list[Any]]
    provenance: list[tuple[str, Any]]


def write_page(record: RunRecord, run_dir: RunDir, results: RunResults, file: Path) -> None:
    """Write the report of a run.

    Raises:
        StorageError: The file cannot be written.
    """
    steps = MetricsFile(run_dir.metrics).read()
    page = make_run_page(record, run_dir, steps, summarize_run(record, run_dir))
    charts = [*([page.charts.main] if page.charts.main else []), *page.charts.small]
    metrics = [metric for chart in charts for metric in chart.metrics]
    checkpoints = [row.step for row in page.checkpoints]
    curves = record_curves(
        steps, metrics, results.held_out_curve, checkpoints, find_first_bad_step(record)
    )
    provenance = list_provenance(record, run_dir)
    report = RunReport(
        held_out_rows=list_held_out_results(results),
        failures=describe_evaluation_faults(results.evaluation or {}),
        phases=_list_phases(run_dir),
        forecast_rows=list_forecast(results),
        provenance=[row for row in provenance if row[1] not in (None, "")],
    )
    write_report_file(file, "run_report.html.j2", {record.run_id: curves}, page=page, report=report)


def _list_phases(run_dir: RunDir) -> list[ReportedPhase]:
    """Return the worst and the best group of each third of the run, then held-out answers."""
    phases = []
    try:
        table = read_group_table(run_dir.rollouts)
        phases = _list_trained_phases(run_dir, table)
    except StorageError:
        # The other parts of the report are still worth reading.
        phases = []
    for when in ("before", "after"):
        samples = read_json_lines(run_dir.evaluation / when / "samples.jsonl")
        groups = [
            ReportedGroup(
                "Held-out item",
                group.prompt,
                group.expected,
                _make_answers(group.answers, group.scores),
                describe_scores(group.scores),
            )
            for group in read_held_out_groups(samples)[:MAX_HELD_OUT_ITEMS]
        ]
        if groups:
            phases.append(ReportedPhase(f"Held-out answers {when} training, the worst", groups))
    return phases


def _list_trained_phases(run_dir: RunDir, table: GroupTable) -> list[ReportedPhase]:
    if not table.num_groups:
        return []
    steps = table.frame["step"]
    first, last = int(steps.min()), int(steps.max())  # type: ignore[arg-type]
    bounds = [first + (last - first + 1) * part // len(PHASES) for part in range(len(PHASES) + 1)]
    phases = []
    for title, start, end in zip(PHASES, bounds, bounds[1:], strict=False):
        query = GroupQuery(first_step=start, last_step=end - 1, order="worst", limit=10**6)
        groups, _ = table.find(query)
        # Only those that could be scored are the worst or the best.
        scored = [group for group in groups if group.mean is not None]
        chosen = [scored[0], scored[-1]] if len(scored) > 1 else scored
        shown = [_read_group(run_dir, group.step, group.group) for group in chosen]
        if shown:
            name = f"{title}, steps {start} to {end - 1}: the worst and the best group"
            phases.append(ReportedPhase(name, shown))
    return phases


def _read_group(run_dir: RunDir, step: int, number: int) -> ReportedGroup:
    rows = read_group(run_dir.rollouts, step, number)
    prompt = rows[0]["prompt"] or ""
    return ReportedGroup(
        f"Step {step:,}",
        prompt,
        read_item_facts(rows[0]["item"], prompt)[0],
        build_answers(rows, None),
        describe_scores([row["score"] for row in rows]),
    )


def _make_answers(texts: Sequence[str], scores: Sequence[float]) -> list[AnswerColumn]:
    rows = [
        {"answer": text, "score": score, "advantage": None, "outcome": "", "reason": None}
        for text, score in zip(texts, scores, strict=True)
    ]
    return build_answers(rows, None)
