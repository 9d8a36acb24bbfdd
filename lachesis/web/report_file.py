"""Write the report of a run, or a comparison, as one HTML file that needs no other.

The page allows exactly its own scripts, by their hashes, and nothing from elsewhere.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lachesis import __version__
from lachesis.base.errors import StorageError
from lachesis.base.files import storage_errors, write_private
from lachesis.base.formatting import MISSING, format_dollars, format_duration, shorten_count
from lachesis.base.json_text import Json, to_compact_json
from lachesis.base.timestamps import now_iso
from lachesis.operations.runs import view_run
from lachesis.reporting.comparison import Comparison
from lachesis.reporting.rollouts import (
    AnswerColumn,
    build_answers,
    read_held_out_lists,
    read_item_facts,
)
from lachesis.reporting.run_curves import CurveRequest, record_curves
from lachesis.reporting.run_headline import find_first_bad_step
from lachesis.reporting.run_view import RunView, list_forecast_ranges
from lachesis.rollouts.groups import GroupQuery, GroupTable, read_group, read_group_table
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import describe_evaluation_faults
from lachesis.runs.provenance import read_provenance
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.web.comparison_page import make_compare_page
from lachesis.web.rendering import STATIC_FOLDER, render_page
from lachesis.web.rollouts_page import describe_scores
from lachesis.web.run_page import make_run_page

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
    """Hold the parts of a report that the page of a run does not have."""

    failures: str
    phases: list[ReportedPhase]
    forecast_rows: list[list[str]]
    provenance: list[tuple[str, Any]]


def write_report(store: RunStore, run_id: str, target: Path | None = None) -> Path:
    """Write the report of a run to a folder, by default in that of the run, and return the file.

    Raises:
        StorageError: The file cannot be written.
    """
    view = view_run(store, run_id)
    file = (target or view.run_dir.path / "report") / "report.html"
    write_page(view, file)
    return file


def write_page(view: RunView, file: Path) -> None:
    """Write the report of a run.

    Raises:
        StorageError: The file cannot be written.
    """
    record, run_dir, page = view.record, view.run_dir, make_run_page(view)
    charts = [*([page.charts.main] if page.charts.main else []), *page.charts.small]
    metrics = [metric for chart in charts for metric in chart.metrics]
    checkpoints = [row.step for row in view.checkpoints]
    curves = record_curves(
        view.steps, metrics, view.curve, checkpoints, find_first_bad_step(record)
    )
    provenance = list_provenance(record, run_dir)
    report = RunReport(
        failures=describe_evaluation_faults(view.evaluation_faults or {}),
        phases=_list_phases(run_dir),
        forecast_rows=_list_forecast(view),
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
    for held_out in read_held_out_lists(run_dir).values():
        groups = [
            ReportedGroup(
                "Held-out item",
                group.prompt,
                group.expected,
                _make_answers(group.answers, group.scores),
                describe_scores(group.scores),
            )
            for group in held_out.groups[:MAX_HELD_OUT_ITEMS]
        ]
        if groups:
            phases.append(ReportedPhase(f"Held-out answers {held_out.title}, the worst", groups))
    return phases


def _list_trained_phases(run_dir: RunDir, table: GroupTable) -> list[ReportedPhase]:
    """Return the worst and the best group of the start, the middle and the end of training."""
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
    """Return one group as a report shows it."""
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


def list_provenance(record: RunRecord, run_dir: RunDir) -> list[tuple[str, Any]]:
    """Return the provenance of a run as rows: command, code, model, data, packages and machine."""
    provenance = read_provenance(run_dir)
    if provenance is None:
        return []
    machine = provenance["machine"]
    sources = provenance["environments"].items()
    model = provenance["model"]
    return [
        ("command", provenance["command"]),
        ("seed", record.seed),
        ("Lachesis", _describe_version(provenance["lachesis"])),
        *((f"code of {name}", _describe_version(source)) for name, source in sources),
        ("model", model.get("revision") or _get_file_name(model.get("folder"))),
        *((f"data {_get_file_name(file)}", digest) for file, digest in provenance["data"].items()),
        ("packages", ", ".join(" ".join(item) for item in provenance["packages"].items())),
        ("Python", machine["python"]),
        (
            "machine",
            f"{machine['cpu_cores']} cores, {machine['memory_gb']} GB, {machine['system']}",
        ),
        ("GPUs", ", ".join(machine["gpus"])),
    ]


def _get_file_name(path: str | None) -> str:
    """Return the last part of a path, so that a report shows no folders of this machine."""
    return Path(path).name if path else ""


def _describe_version(source: Json) -> str:
    """Return the file or the version, and the git commit with whether it was changed."""
    place = _get_file_name(source.get("file")) or str(source.get("version"))
    if "commit" not in source:
        return place
    changed = ", with changes that are not committed" if source["changed"] else ""
    return f"{place}, commit {source['commit'][:12]}{changed}"


def _list_forecast(view: RunView) -> list[list[str]]:
    """Return a row per quantity of the forecast, beside what the run has used, and the ratio."""
    if view.forecast is None or view.actual is None:
        return []
    actual = view.actual
    used = {
        "tokens": (shorten_count(view.usage.tokens), actual.ratio.get("tokens")),
        "training": (format_duration(actual.training_hours * 3600), actual.ratio.get("hours")),
        "cost": (
            MISSING if actual.cost_usd is None else format_dollars(actual.cost_usd),
            actual.ratio.get("cost_usd"),
        ),
    }
    return [
        [name, span, used[name][0], MISSING if used[name][1] is None else f"{used[name][1]:.2f}"]
        for name, span in list_forecast_ranges(view.forecast)
    ]


STYLES = ("vendor/uPlot.min.css", "colors.css", "layout.css", "pages.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "common.js", "curves.js")


@dataclass(frozen=True)
class ReportAssets:
    """Hold the styles, scripts and data that a report contains; all are written by this program."""

    theme: Markup
    styles: Markup
    scripts: Markup
    data: Markup
    script_sources: Markup
    """The hashes of the scripts for the policy of the page."""


def make_report_assets(data: Json) -> ReportAssets:
    """Return the assets of a report with the data of its curves."""
    theme = _read("theme.js")
    scripts = "\n".join(map(_read, SCRIPTS))
    # In JSON the sign can be escaped, so that no text of a run ends the element.
    text = to_compact_json(data).replace("<", "\\u003c")
    sources = " ".join(f"'sha256-{_compute_hash(script)}'" for script in (theme, scripts))
    return ReportAssets(
        Markup(theme),
        Markup("\n".join(map(_read, STYLES))),
        Markup(scripts),
        Markup(text),
        Markup(sources),
    )


def write_report_file(file: Path, template: str, data: Json, **values: object) -> None:
    """Write a page that is one file.

    Args:
        file: The file to write.
        template: The template of the page.
        data: The curves of each run by its id; see `lachesis.reporting.run_curves`.
        values: What the template shows.

    Raises:
        StorageError: The file cannot be written.
    """
    text = render_page(
        template,
        is_report=True,
        assets=make_report_assets(data),
        # Nothing of a report has an address.
        address=lambda **changes: "#",
        curve_request=CurveRequest(),
        version=__version__,
        written_at=now_iso(),
        **values,
    )
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written atomically, because somebody may be reading the previous page.
        write_private(file, text)


def _read(name: str) -> str:
    return (STATIC_FOLDER / name).read_text(encoding="utf-8")


def _compute_hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def write_comparison(comparison: Comparison, file: Path) -> None:
    """Write the page that compares runs.

    Raises:
        ArgumentsError: There are more runs than a page can tell apart.
        StorageError: The file cannot be written.
    """
    page = make_compare_page(comparison)
    metrics = [metric for chart in page.charts for metric in chart.metrics]
    data = {
        run.record.run_id: record_curves(run.steps, metrics, run.curve, [])
        for run in comparison.runs
    }
    write_report_file(file, "comparison_report.html.j2", data, page=page)
