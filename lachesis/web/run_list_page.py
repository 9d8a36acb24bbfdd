"""Lay out the list of runs, and serve it as a page and as CSV.

What is the same in all shown rows is said once above the table; a value that differs from that of
most rows is bold.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.base.formatting import count_in_words, format_duration, format_setting, shorten_count
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_list import LETTERS, ROWS_PER_PAGE, RunFilter, select_runs
from lachesis.reporting.run_summary import RunSummary, find_differing_settings, get_model_name
from lachesis.reporting.verdict_marks import ALARMING, Mark, choose_mark, explain_mark, needs_a_look
from lachesis.runs.held_out_results import HeldOutPoint
from lachesis.runs.record import RunRecord
from lachesis.web.inline_svg import Sparkline, draw_sparkline
from lachesis.web.live_updates import answer_unchanged, make_tag, read_list_state
from lachesis.web.rendering import make_csv_response, make_page

# Columns of settings that differ; the rest of them is counted below the table.
MAX_SETTING_COLUMNS = 5
MAX_ALARMS = 6


@dataclass(frozen=True)
class SettingCell:
    """Hold the value of one setting in one row."""

    name: str
    text: str
    is_number: bool
    is_unusual: bool
    """Whether most of the shown rows have another value."""


@dataclass(frozen=True)
class RunRow:
    """Hold the row of one run."""

    record: RunRecord
    summary: RunSummary
    mark: Mark
    state: str
    progress: float | None
    """The share of the steps that a living run has made."""
    sparkline: Sparkline | None
    before: HeldOutPoint | None
    held_out: HeldOutPoint | None
    """The newest held-out result of trained weights."""
    cells: list[SettingCell]
    took: str
    tokens: str
    letter: str
    """The letter of a run that is ticked for a comparison, or nothing."""


@dataclass(frozen=True)
class RunListPage:
    """Hold the parts of the page of all runs."""

    rows: list[RunRow]
    num_runs: int
    num_matching: int
    num_living: int
    lead: str
    """The answer in words, the important part."""
    lead_rest: str
    alarms: list[tuple[RunRecord, Mark, str]]
    num_more_alarms: int
    equal: list[tuple[str, str]]
    """What all shown rows have in common, by name."""
    num_equal_settings: int
    setting_names: list[str]
    num_hidden_columns: int
    has_cost: bool
    environments: list[str]
    tags: list[str]
    filter: RunFilter
    num_pages: int


def build_run_list(cache: RunCache, run_filter: RunFilter) -> RunListPage:
    """Return the page of the runs that a filter lets through."""
    records = cache.list_records()
    matching = select_runs(records, run_filter, cache.summarize)
    num_pages = max(1, -(-len(matching) // ROWS_PER_PAGE))
    first = (min(run_filter.page, num_pages) - 1) * ROWS_PER_PAGE
    shown = matching[first : first + ROWS_PER_PAGE]
    summaries = [cache.summarize(record) for record in shown]
    differing = _choose_columns(summaries, run_filter)
    lead, lead_rest = _write_lead(records)
    alarms = [record for record in records if needs_a_look(record)]
    return RunListPage(
        rows=_build_rows(cache, summaries, differing, run_filter),
        num_runs=len(records),
        num_matching=len(matching),
        num_living=sum(not record.has_ended for record in records),
        lead=lead,
        lead_rest=lead_rest,
        alarms=[
            (record, choose_mark(record), explain_mark(record) or record.status)
            for record in alarms[:MAX_ALARMS]
        ],
        num_more_alarms=max(0, len(alarms) - MAX_ALARMS),
        equal=_list_equal_facts(summaries),
        num_equal_settings=_count_equal_settings(summaries),
        setting_names=list(differing),
        num_hidden_columns=len(_find_columns(summaries, run_filter)) - len(differing),
        has_cost=any(summary.cost_usd for summary in summaries),
        environments=sorted({record.environment for record in records}),
        tags=sorted({tag for record in records for tag in record.tags}),
        filter=run_filter,
        num_pages=num_pages,
    )


def _write_lead(records: Sequence[RunRecord]) -> tuple[str, str]:
    """Return the sentence above the list in two parts, the first of which is bold."""
    num_alarming = sum(choose_mark(record).word in ALARMING for record in records)
    num_living = sum(not record.has_ended for record in records)
    if not records:
        return "No runs yet.", ""
    of_runs = f"of {len(records):,} runs"
    if num_alarming == 0:
        lead = "One run." if len(records) == 1 else f"{len(records):,} runs, none needs a look."
    elif len(records) == 1:
        lead = "The one run needs a look."
    elif num_alarming == 1:
        lead = f"One {of_runs} needs a look."
    else:
        lead = f"{count_in_words(num_alarming, is_first=True)} {of_runs} need a look."
    if num_living == 0:
        return lead, ""
    verb = "is" if num_living == 1 else "are"
    return lead, f"{count_in_words(num_living, is_first=True)} {verb} running."


def _find_columns(summaries: Sequence[RunSummary], run_filter: RunFilter) -> dict[str, str]:
    """Return all settings that may be columns, by their short names, but the model's name."""
    if run_filter.columns == "all":
        keys = dict.fromkeys(key for summary in summaries for key in summary.settings)
        columns = {key.removeprefix("env.").removeprefix("tinker."): key for key in keys}
    else:
        columns = find_differing_settings(summaries)
    return {name: key for name, key in columns.items() if name not in ("model", "profile")}


def _choose_columns(summaries: Sequence[RunSummary], run_filter: RunFilter) -> dict[str, str]:
    """Return the settings that a table has room for, those first that tell runs apart."""
    columns = _find_columns(summaries, run_filter)
    if run_filter.columns == "all":
        return columns
    # A table has room for a few columns.
    # Settings that most often differ from what most runs have tell the rows apart best.
    ranked = sorted(columns, key=lambda name: -_count_unusual(summaries, columns[name]))
    chosen = set(ranked[:MAX_SETTING_COLUMNS])
    return {name: key for name, key in columns.items() if name in chosen}


def _count_values(summaries: Sequence[RunSummary], key: str) -> Counter[str]:
    return Counter(str(summary.settings[key]) for summary in summaries if key in summary.settings)


def _count_unusual(summaries: Sequence[RunSummary], key: str) -> int:
    counts = _count_values(summaries, key)
    return sum(counts.values()) - max(counts.values(), default=0)


def _find_usual_value(summaries: Sequence[RunSummary], key: str) -> str | None:
    """Return the value that more than half of the rows have, or None."""
    counts = _count_values(summaries, key).most_common(1)
    if counts and counts[0][1] * 2 > len(summaries):
        return counts[0][0]
    return None


def _build_rows(
    cache: RunCache,
    summaries: Sequence[RunSummary],
    differing: dict[str, str],
    run_filter: RunFilter,
) -> list[RunRow]:
    """Return the rows of the list, with sparklines from 0 to 1, or as far as the rewards reach."""
    usual = {key: _find_usual_value(summaries, key) for key in differing.values()}
    rows = []
    for summary in summaries:
        record = summary.record
        series = cache.read_reward_samples(record.run_id, summary.step)
        trained = summary.held_out if summary.held_out and summary.held_out.step > 0 else None
        rows.append(
            RunRow(
                record=record,
                summary=summary,
                mark=choose_mark(record),
                state=_describe_state(summary),
                progress=None if record.has_ended else summary.step / record.total_steps,
                sparkline=draw_sparkline(series, record.total_steps),
                before=summary.held_out_before,
                held_out=trained,
                cells=[
                    _make_cell(summary, name, key, usual[key]) for name, key in differing.items()
                ],
                took=_describe_duration(summary),
                tokens=_describe_tokens(summary),
                letter=_find_letter(record.run_id, run_filter),
            )
        )
    return rows


def _find_letter(run_id: str, run_filter: RunFilter) -> str:
    if run_id in run_filter.ticked:
        return LETTERS[run_filter.ticked.index(run_id)]
    return ""


def _make_cell(summary: RunSummary, name: str, key: str, usual: str | None) -> SettingCell:
    if key not in summary.settings:
        return SettingCell(name, "–", is_number=False, is_unusual=False)
    value: Any = summary.settings[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_unusual = usual is not None and str(value) != usual
    return SettingCell(name, format_setting(value), is_number, is_unusual)


def _describe_state(summary: RunSummary) -> str:
    """Return how a run stands, in a few words."""
    record = summary.record
    if record.status == "running":
        return f"step {summary.step:,} of {record.total_steps:,}"
    if not record.has_ended:
        return record.phase if record.status == "starting" else record.status
    if record.status == "completed":
        return "completed"
    return f"{record.status}, step {summary.step:,}"


def _describe_duration(summary: RunSummary) -> str:
    if summary.duration_s is None:
        return "–"
    return format_duration(summary.duration_s)


def _describe_tokens(summary: RunSummary) -> str:
    return f"{shorten_count(summary.tokens)} tokens" if summary.tokens else "no tokens"


def _list_equal_facts(summaries: Sequence[RunSummary]) -> list[tuple[str, str]]:
    """Return the facts in which all shown rows are equal, as names and values."""
    facts: dict[str, set[str]] = {}
    for summary in summaries:
        record = summary.record
        for name, value in (
            ("environment", record.environment),
            ("model", get_model_name(record)),
            ("profile", record.profile),
            ("steps", f"{record.total_steps:,}"),
            ("rollouts a step", f"{record.batch_size:,}"),
        ):
            facts.setdefault(name, set()).add(value)
    if len(summaries) < 2:
        return []
    return [(name, values.pop()) for name, values in facts.items() if len(values) == 1]


def _count_equal_settings(summaries: Sequence[RunSummary]) -> int:
    if len(summaries) < 2:
        return 0
    keys = {key for summary in summaries for key in summary.settings}
    return len(keys) - len(find_differing_settings(summaries))


def show_run_list(request: Request) -> Response:
    """Answer with the page of the runs that the address asks for."""
    cache: RunCache = request.app.state.cache
    tag = make_tag(request, read_list_state(cache))
    if unchanged := answer_unchanged(request, tag):
        return unchanged
    page = build_run_list(cache, RunFilter.from_query(request.query_params))
    return make_page(request, "run_list.html.j2", section="runs", tag=tag, page=page)


def download_run_list(request: Request) -> Response:
    """Answer with all runs that the address asks for as CSV, a column per setting."""
    cache: RunCache = request.app.state.cache
    run_filter = RunFilter.from_query(request.query_params)
    records = select_runs(cache.list_records(), run_filter, cache.summarize)
    return make_csv_response("runs.csv", [_make_row(cache.summarize(record)) for record in records])


def _make_row(summary: RunSummary) -> dict[str, object]:
    """Return one run as a row of CSV, with all of its settings."""
    record, point = summary.record, summary.held_out
    return {
        "run_id": record.run_id,
        "name": record.name,
        "environment": record.environment,
        "status": record.status,
        "health": choose_mark(record).word,
        "created_at": record.created_at,
        "steps": summary.step,
        "first_reward": summary.reward.get("first"),
        "last_reward": summary.reward.get("last"),
        "held_out": point.percent_correct if point else None,
        "held_out_items": point.items if point else None,
        "held_out_low": point.low if point else None,
        "held_out_high": point.high if point else None,
        "seconds": summary.duration_s,
        "tokens": summary.tokens,
        "cost_usd": summary.cost_usd,
        "tags": " ".join(record.tags),
        "note": record.note,
        **summary.settings,
    }


RUN_LIST_ROUTES = [Route("/runs", show_run_list), Route("/runs.csv", download_run_list)]
