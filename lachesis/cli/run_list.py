"""Run `lachesis runs`: list the runs that were asked for, with what distinguishes them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

from lachesis.base.errors import ArgumentsError
from lachesis.base.json_text import Json
from lachesis.cli import console, show_run_list
from lachesis.cli.console import print_answer
from lachesis.operations.service import LachesisService
from lachesis.reporting.run_summary import RunSummary, find_differing_settings, summarize_run
from lachesis.runs.record import RunRecord, RunStatusName

STATUSES: tuple[str, ...] = get_args(RunStatusName)
# Orders of the list, the greatest value first; a run without a value is at the end.
SORT_VALUES: dict[str, Callable[[RunSummary], Any]] = {
    "created": lambda summary: summary.record.created_at,
    "reward": lambda summary: summary.reward.get("last"),
    "held-out": lambda summary: summary.held_out and summary.held_out.percent_correct,
    "steps": lambda summary: summary.step,
    "duration": lambda summary: summary.duration_s,
}


def handle_runs(args: argparse.Namespace) -> None:
    """Print the runs with their progress, results and differing settings."""
    if args.status and args.status not in STATUSES:
        raise ArgumentsError(f"--status {args.status!r}; allowed: {', '.join(STATUSES)}")
    service = LachesisService()
    records, warning = service.list_runs_with_warning()
    matching = [record for record in records if _matches(record, args)]
    # Summaries read the metrics of a run, so that of many runs only those that are shown have one.
    if args.sort == "created":
        shown = [_summarize(service, record) for record in matching[: args.limit]]
    else:
        summaries = _sort([_summarize(service, record) for record in matching], args.sort)
        shown = summaries[: args.limit]
    rows = _make_rows(shown)
    if warning:
        console.print_note(warning)
    answer = {"runs": rows, "count": len(rows), "matching": len(matching), "total": len(records)}
    print_answer(args, answer, show_run_list.render_runs(rows, len(matching), len(records)))


def _make_rows(summaries: list[RunSummary]) -> list[Json]:
    """Return the runs as JSON, each with its values of the settings that differ."""
    differing = find_differing_settings(summaries)
    rows = []
    for summary in summaries:
        # A run on another environment may not have the field.
        own_keys = {name: key for name, key in differing.items() if key in summary.settings}
        values = {name: summary.settings[key] for name, key in own_keys.items()}
        rows.append({**summary.to_payload(), "differing": values})
    return rows


def _summarize(service: LachesisService, record: RunRecord) -> RunSummary:
    return summarize_run(record, service.store.dir(record.run_id))


def _matches(record: RunRecord, args: argparse.Namespace) -> bool:
    """Return whether a run is one of those that were asked for."""
    return (
        args.env in (None, record.environment, *record.additional_environments)
        and args.status in (None, record.status)
        and (args.tag is None or args.tag in record.tags)
    )


def _sort(summaries: list[RunSummary], key: str) -> list[RunSummary]:
    if key == "name":
        return sorted(summaries, key=lambda summary: summary.record.title)
    get_value = SORT_VALUES[key]
    with_value = [summary for summary in summaries if get_value(summary) is not None]
    without_value = [summary for summary in summaries if get_value(summary) is None]
    return sorted(with_value, key=get_value, reverse=True) + without_value
