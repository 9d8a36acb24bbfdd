"""Lay out the comparison of runs, and serve it as a page and as CSV."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.base.errors import ArgumentsError
from lachesis.base.formatting import (
    MISSING,
    format_dollars,
    format_duration,
    format_reward,
    format_setting,
)
from lachesis.reporting.charts import COMPARED_CHARTS, Chart
from lachesis.reporting.comparison import (
    ComparedRun,
    Comparison,
    find_difference,
    make_compared_run,
    rank_runs,
    write_compare_lead,
)
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_list import LETTERS, MAX_COMPARED_RUNS
from lachesis.reporting.verdict_marks import Mark, choose_mark
from lachesis.runs.held_out_results import HeldOutPoint, split_curve
from lachesis.runs.record import RunRecord
from lachesis.web.curves import read_curve_request
from lachesis.web.rendering import make_csv_response, make_page

# Mean reward whose first step is compared.
REACHED_REWARD = 0.7
REACHED_STEPS = 5


@dataclass(frozen=True)
class ComparedColumn:
    """Hold the parts of the comparison about one run."""

    letter: str
    record: RunRecord
    mark: Mark
    state: str
    before: HeldOutPoint | None
    after: HeldOutPoint | None
    ahead: str
    """By how much the baseline is ahead, with its interval."""
    is_difference_seen: bool


@dataclass(frozen=True)
class ComparedRow:
    """Hold one setting or result of all runs."""

    name: str
    key: str
    """The name for a program."""
    values: list[Any]
    """The values as they are; None for a run that has none."""
    texts: list[str]
    differs: list[bool]
    """Whether each value is unlike that of the baseline."""


@dataclass(frozen=True)
class ComparePage:
    """Hold the parts of the comparison page."""

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
    """Return the comparison of the runs of these ids, for the page that lays them side by side.

    Raises:
        UnknownRunError: One of them does not exist.
    """
    return Comparison([make_compared_run(cache.view(run_id)) for run_id in run_ids])


def _build_column(run: ComparedRun, baseline: ComparedRun, place: int) -> ComparedColumn:
    """Return one compared run as a column, with how far it is ahead of the first."""
    record = run.record
    ahead, is_seen = ("–", False) if run is baseline else _compare_with(baseline, run)
    return ComparedColumn(
        letter=LETTERS[place],
        record=record,
        mark=choose_mark(record),
        state=_describe_state(run),
        before=split_curve(run.curve)[0],
        after=run.held_out,
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


def _compare_with(baseline: ComparedRun, run: ComparedRun) -> tuple[str, bool]:
    """Return by how much the baseline is ahead, and whether the items show a difference."""
    difference = find_difference(baseline, run)
    if difference is None:
        return "no result", False
    return difference.describe(), difference.is_seen


def _describe_items(runs: Sequence[ComparedRun]) -> str:
    counts = {run.held_out.items for run in runs if run.held_out and run.held_out.items}
    if len(counts) == 1 and len({run.record.environment for run in runs}) == 1:
        return f"held out on {counts.pop()} items"
    return ""


def _make_setting_row(name: str, key: str, runs: Sequence[ComparedRun]) -> ComparedRow:
    values = [run.summary.settings.get(key) for run in runs]
    texts = [
        format_setting(value) if key in run.summary.settings else MISSING
        for run, value in zip(runs, values, strict=True)
    ]
    return ComparedRow(name, name, values, texts, [value != values[0] for value in values])


def _list_results(runs: Sequence[ComparedRun]) -> list[ComparedRow]:
    """Return the rows of results: rewards, steps, time, tokens and cost."""
    summaries = [run.summary for run in runs]
    rows = [
        _make_result_row(
            "Reward, last steps", "last_reward",
            [summary.reward.get("last") for summary in summaries], format_reward,
        ),
        _make_result_row(
            f"Steps to a reward of {REACHED_REWARD}", f"steps_to_reward_{REACHED_REWARD}",
            [_find_reached_step(run) for run in runs], _write_count, missing="never",
        ),
        _make_result_row("Steps", "steps", [summary.step for summary in summaries], _write_count),
        _make_result_row(
            "Took", "seconds", [summary.duration_s for summary in summaries], format_duration
        ),
        _make_result_row(
            "Tokens", "tokens", [summary.tokens for summary in summaries], _write_count
        ),
    ]  # fmt: skip
    if any(summary.cost_usd for summary in summaries):
        costs = [summary.cost_usd for summary in summaries]
        rows.append(_make_result_row("Cost", "cost_usd", costs, format_dollars))
    return rows


def _make_result_row(
    name: str, key: str, values: Sequence[Any], write: Callable[[Any], str], missing: str = MISSING
) -> ComparedRow:
    texts = [missing if value is None else write(value) for value in values]
    return ComparedRow(name, key, list(values), texts, [False] * len(values))


def _write_count(count: int) -> str:
    return f"{count:,}"


def _find_reached_step(run: ComparedRun) -> int | None:
    """Return the first step at which the mean of the last five rewards was high enough."""
    rewards: list[float] = []
    for step in run.steps:
        if step.get("reward/mean") is not None:
            rewards.append(step["reward/mean"])
        recent = rewards[-REACHED_STEPS:]
        if len(recent) == REACHED_STEPS and sum(recent) / REACHED_STEPS >= REACHED_REWARD:
            return int(step["step"])
    return None


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
    ranking = rank_runs(runs)
    if ranking is None:
        return "A held-out result of trained weights is needed; `final_evaluation` makes one."
    if not ranking.rivals:
        return ""
    lead = find_difference(ranking.best, ranking.rivals[0])
    items = ranking.best.held_out.items if ranking.best.held_out else None
    if lead is None or lead.low is None or lead.high is None:
        return ""
    unseen = (lead.high - lead.low) / 2
    return (
        "Which of the best runs is better needs more held-out items or more seeds: with "
        f"{items:,} items, a difference below about {unseen:.2f} cannot be seen."
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
        "comparison.html.j2",
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
        {"name": row.key, **dict(zip(run_ids, row.values, strict=True))}
        for row in (*page.settings, *page.equal, *page.results)
    ]
    return make_csv_response("comparison.csv", rows)


def read_run_ids(request: Request) -> list[str]:
    """Return the runs that an address names: `runs=a,b`, or `runs=a&runs=b` as forms send it."""
    texts = request.query_params.getlist("runs")
    return list(dict.fromkeys(name for text in texts for name in text.split(",") if name))


COMPARE_ROUTES = [Route("/compare", show_comparison), Route("/compare.csv", download_comparison)]
