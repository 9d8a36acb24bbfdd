"""Lay out the comparison of runs, and serve it as a page and as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.base.confidence_intervals import newcombe_interval
from lachesis.base.errors import ArgumentsError
from lachesis.base.formatting import format_duration
from lachesis.reporting.comparison import ComparedRun, Comparison, write_compare_lead
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_list import LETTERS, MAX_COMPARED_RUNS
from lachesis.reporting.verdict_marks import Mark, choose_mark
from lachesis.runs.held_out_results import HeldOutPoint, build_held_out_curve
from lachesis.runs.record import RunRecord
from lachesis.web.charts import COMPARED_CHARTS, Chart
from lachesis.web.curve_routes import read_curve_request
from lachesis.web.inline_svg import IntervalDrawing, draw_interval
from lachesis.web.rendering import make_csv_response, make_page
from lachesis.web.wording import format_reward, format_setting

# The width of the axis of held-out results, in units of its picture.
FOREST_WIDTH = 400.0
# Mean reward whose first step is compared.
REACHED_REWARD = 0.7
REACHED_STEPS = 5


@dataclass(frozen=True)
class ComparedColumn:
    """Hold what the page shows of one run."""

    letter: str
    record: RunRecord
    mark: Mark
    state: str
    before: HeldOutPoint | None
    after: HeldOutPoint | None
    before_drawing: IntervalDrawing | None
    after_drawing: IntervalDrawing | None
    ahead: str
    """By how much the baseline is ahead, with its interval."""
    is_difference_seen: bool


@dataclass(frozen=True)
class ComparedRow:
    """Hold one setting or result of all runs."""

    name: str
    values: list[str]
    differs: list[bool]
    """Whether each value is unlike that of the baseline."""


@dataclass(frozen=True)
class ComparePage:
    """Hold what the page shows."""

    columns: list[ComparedColumn]
    lead: str
    lead_rest: str
    items: str
    """On how many held-out items the results are, in words."""
    settings: list[ComparedRow]
    num_settings: int
    equal: list[ComparedRow]
    """The settings that are equal, if they were asked for."""
    results: list[ComparedRow]
    note: str
    charts: list[Chart]
    advice: str
    commands: list[str]


def build_compare_page(
    cache: RunCache, run_ids: Sequence[str], *, shows_equal: bool = False
) -> ComparePage:
    """Return the page that compares runs.

    Raises:
        ArgumentsError: There are fewer than two runs, or too many.
        UnknownRunError: One of them does not exist.
    """
    _check_number(len(run_ids))
    return make_compare_page(read_comparison(cache, run_ids), shows_equal=shows_equal)


def _check_number(num_runs: int) -> None:
    if not 2 <= num_runs <= MAX_COMPARED_RUNS:
        raise ArgumentsError(
            f"{num_runs} runs were asked for; allowed: 2 to {MAX_COMPARED_RUNS}, as in "
            "/compare?runs=a,b"
        )


def make_compare_page(comparison: Comparison, *, shows_equal: bool = False) -> ComparePage:
    """Return the page of a comparison.

    Raises:
        ArgumentsError: There are fewer than two runs, or too many.
    """
    runs = comparison.runs
    _check_number(len(runs))
    lead, lead_rest = write_compare_lead(comparison)
    differing = comparison.differing
    keys = dict.fromkeys(key for run in runs for key in run.summary.settings)
    equal_keys = [key for key in keys if key not in differing.values()]
    return ComparePage(
        columns=[_build_column(run, runs[0], place) for place, run in enumerate(runs)],
        lead=lead,
        lead_rest=lead_rest,
        items=_describe_items(runs),
        settings=[_make_setting_row(name, key, runs) for name, key in differing.items()],
        num_settings=len(keys),
        equal=[_make_setting_row(key, key, runs) for key in equal_keys] if shows_equal else [],
        results=_list_results(runs),
        note=_describe_differences(comparison),
        charts=_choose_charts(runs),
        advice=_advise(runs),
        commands=_list_commands(runs),
    )


def read_comparison(cache: RunCache, run_ids: Sequence[str]) -> Comparison:
    """Return the comparison of runs.

    Raises:
        UnknownRunError: One of them does not exist.
    """
    compared = []
    for run_id in run_ids:
        record, steps = cache.load_record(run_id), cache.read_steps(run_id)
        curve = build_held_out_curve(steps)
        compared.append(ComparedRun(cache.summarize(record), steps, curve))
    return Comparison(compared)


def _build_column(run: ComparedRun, baseline: ComparedRun, place: int) -> ComparedColumn:
    record, after = run.record, run.held_out
    before = run.curve[0] if run.curve and run.curve[0].step == 0 else None
    ahead, is_seen = ("–", False) if run is baseline else _compare_with(baseline.held_out, after)
    return ComparedColumn(
        letter=LETTERS[place],
        record=record,
        mark=choose_mark(record),
        state=_describe_state(run),
        before=before,
        after=after,
        before_drawing=draw_interval(before, FOREST_WIDTH, 0.0),
        after_drawing=draw_interval(after, FOREST_WIDTH, 0.0),
        ahead=ahead,
        is_difference_seen=is_seen,
    )


def _describe_state(run: ComparedRun) -> str:
    record = run.record
    duration = run.summary.duration_s
    took = "" if duration is None else f", {format_duration(duration)}"
    if record.has_ended:
        return f"{record.status}{took}"
    return f"{record.status}, step {run.summary.step:,} of {record.total_steps:,}"


def _compare_with(first: HeldOutPoint | None, second: HeldOutPoint | None) -> tuple[str, bool]:
    """Return by how much the first result is ahead, and whether the items show a difference."""
    if first is None or second is None:
        return "no result", False
    difference = first.percent_correct - second.percent_correct
    text = f"{difference:.2f}".replace("-", "−")
    if not first.items or not second.items:
        return text, False
    low, high = newcombe_interval(
        first.percent_correct, first.items, second.percent_correct, second.items
    )
    interval = f"{low:.2f} to {high:.2f}".replace("-", "−")
    return f"{text} ({interval})", low > 0 or high < 0


def _describe_items(runs: Sequence[ComparedRun]) -> str:
    counts = {run.held_out.items for run in runs if run.held_out and run.held_out.items}
    if len(counts) == 1 and len({run.record.environment for run in runs}) == 1:
        return f"held out on {counts.pop()} items"
    return ""


def _make_setting_row(name: str, key: str, runs: Sequence[ComparedRun]) -> ComparedRow:
    values = [run.summary.settings.get(key) for run in runs]
    texts = [
        format_setting(value) if key in run.summary.settings else "–"
        for run, value in zip(runs, values, strict=True)
    ]
    return ComparedRow(name, texts, [value != values[0] for value in values])


def _list_results(runs: Sequence[ComparedRun]) -> list[ComparedRow]:
    rows: dict[str, list[str]] = {
        "Reward, last steps": [format_reward(run.summary.reward.get("last")) for run in runs],
        f"Steps to a reward of {REACHED_REWARD}": [_find_reached_step(run) for run in runs],
        "Steps": [f"{run.summary.step:,} of {run.record.total_steps:,}" for run in runs],
        "Took": [
            "–" if run.summary.duration_s is None else format_duration(run.summary.duration_s)
            for run in runs
        ],
        "Tokens": [
            "–" if run.summary.tokens is None else f"{run.summary.tokens:,}" for run in runs
        ],
    }
    if any(run.summary.cost_usd for run in runs):
        costs = [run.summary.cost_usd for run in runs]
        rows["Cost"] = ["–" if cost is None else f"${cost:,.2f}" for cost in costs]
    return [ComparedRow(name, values, [False] * len(runs)) for name, values in rows.items()]


def _find_reached_step(run: ComparedRun) -> str:
    """Return the first step at which the mean of the last five rewards was high enough."""
    rewards: list[float] = []
    for step in run.steps:
        if step.get("reward/mean") is not None:
            rewards.append(step["reward/mean"])
        recent = rewards[-REACHED_STEPS:]
        if len(recent) == REACHED_STEPS and sum(recent) / REACHED_STEPS >= REACHED_REWARD:
            return f"{step['step']:,}"
    return "never"


def _describe_differences(comparison: Comparison) -> str:
    """Say in how many settings each run differs from the baseline."""
    baseline, *others = comparison.runs
    keys = comparison.differing.values()
    parts = []
    for letter, run in zip(LETTERS[1:], others, strict=False):
        count = sum(
            run.summary.settings.get(key) != baseline.summary.settings.get(key) for key in keys
        )
        if count == 1:
            parts.append(f"{letter} differs from A in one setting.")
        elif count > 1:
            parts.append(f"{letter} differs in {count}, so none of them alone explains its result.")
    return " ".join(parts)


def _choose_charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    names = {name for run in runs for step in run.steps[-1:] for name in step}
    return [chart for chart in COMPARED_CHARTS if names.intersection(chart.metrics)]


def _advise(runs: Sequence[ComparedRun]) -> str:
    """Say which difference the held-out items could show at all, if they show none."""
    points = [run.held_out for run in runs if run.held_out and run.held_out.items]
    if len(points) < 2:
        return "A held-out result of trained weights is needed; `final_evaluation` makes one."
    # Only the two best matter: the others are behind anyway.
    points.sort(key=lambda point: -point.percent_correct)
    best, second = points[:2]
    low, high = newcombe_interval(
        best.percent_correct, best.items or 1, second.percent_correct, second.items or 1
    )
    # The best run can be told from the others, so nothing more is needed.
    if low > 0:
        return ""
    return (
        "Which of the best runs is better needs more held-out items or more seeds: with "
        f"{best.items} items, a difference below about {(high - low) / 2:.2f} cannot be seen."
    )


def _list_commands(runs: Sequence[ComparedRun]) -> list[str]:
    run_ids = " ".join(run.record.run_id for run in runs)
    seeds: list[Any] = [run.record.seed for run in runs]
    return [
        f"lachesis train --like {runs[0].record.run_id} --set seed={max(seeds) + 1}",
        f"lachesis report {run_ids}",
    ]


def show_comparison(request: Request) -> Response:
    """Answer with the comparison of the runs that the address names."""
    cache: RunCache = request.app.state.cache
    shows_equal = bool(request.query_params.get("all"))
    return make_page(
        request,
        "compare.html.j2",
        section="compare",
        page=build_compare_page(cache, read_run_ids(request), shows_equal=shows_equal),
        curve_request=read_curve_request(request),
    )


def download_comparison(request: Request) -> Response:
    """Answer with the settings and results of the runs as CSV, a column per run."""
    cache: RunCache = request.app.state.cache
    page = build_compare_page(cache, read_run_ids(request), shows_equal=True)
    run_ids = [column.record.run_id for column in page.columns]
    rows = [
        {"name": row.name, **dict(zip(run_ids, row.values, strict=True))}
        for row in (*page.settings, *page.equal, *page.results)
    ]
    return make_csv_response("comparison.csv", rows)


def read_run_ids(request: Request) -> list[str]:
    """Return the runs that an address names: `runs=a,b`, or `runs=a&runs=b` as forms send it."""
    texts = request.query_params.getlist("runs")
    return list(dict.fromkeys(name for text in texts for name in text.split(",") if name))


COMPARE_ROUTES = [
    Route("/compare", show_comparison),
    Route("/compare.csv", download_comparison),
]
