"""Run `runs`: list the runs that were asked for, with what distinguishes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.argparse_types import NUM_RUNS
from lachesis.base.errors import ArgumentsError
from lachesis.base.formatting import format_duration
from lachesis.base.json_text import Json
from lachesis.cli import terminal
from lachesis.cli.options import Output, number, options_class
from lachesis.cli.terminal import (
    HEALTH_STYLES,
    STATUS_STYLES,
    format_local_time,
    localize_times,
    print_answer,
    shorten_middle,
)
from lachesis.operations.run_lists import list_runs_with_warning
from lachesis.reporting.run_list import RunSummary, find_differing_settings, summarize_run
from lachesis.runs.held_out_results import describe_share
from lachesis.runs.record import RunRecord, RunStatusName
from lachesis.runs.store import RunStore

STATUSES: tuple[str, ...] = get_args(RunStatusName)
# Orders of the list, the greatest value first; a run without a value is at the end.
SORT_VALUES: dict[str, Callable[[RunSummary], Any]] = {
    "created": lambda summary: summary.record.created_at,
    "reward": lambda summary: summary.reward.get("last"),
    "held-out": lambda summary: summary.held_out and summary.held_out.percent_correct,
    "steps": lambda summary: summary.step,
    "duration": lambda summary: summary.duration_s,
}


@options_class
class ListOptions(Output):
    """Options of `lachesis runs`."""

    env: Annotated[str | None, Parameter(help="those on this environment", metavar="NAME")] = None
    status: Annotated[
        str | None, Parameter(help="those in this state, such as running or failed", metavar="WORD")
    ] = None
    tag: Annotated[str | None, Parameter(help="those with this tag")] = None
    sort: Annotated[
        Literal["created", "reward", "held-out", "steps", "duration", "name"],
        Parameter(help="the greatest first (default: created)"),
    ] = "created"
    limit: Annotated[int, number(NUM_RUNS, "runs at most", "--limit", "-n", default=20)] = 20


def runs(*, options: ListOptions = ListOptions()) -> None:
    """Print the runs with their progress, results and differing settings."""
    if options.status and options.status not in STATUSES:
        raise ArgumentsError(f"--status {options.status!r}; allowed: {', '.join(STATUSES)}")
    store = RunStore()
    records, warning = list_runs_with_warning(store)
    matching = [record for record in records if _matches(record, options)]
    # Summaries read the metrics of a run, so that of many runs only those that are shown have one.
    if options.sort == "created":
        shown = [_summarize(store, record) for record in matching[: options.limit]]
    else:
        summaries = _sort([_summarize(store, record) for record in matching], options.sort)
        shown = summaries[: options.limit]
    rows = _make_rows(shown)
    if warning:
        terminal.print_note(warning)
    answer = {"runs": rows, "count": len(rows), "matching": len(matching), "total": len(records)}
    print_answer(options, answer, render_runs(rows, len(matching), len(records)))


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


def _summarize(store: RunStore, record: RunRecord) -> RunSummary:
    return summarize_run(record, store.dir(record.run_id))


def _matches(record: RunRecord, options: ListOptions) -> bool:
    """Return whether a run is one of those that were asked for."""
    return (
        options.env in (None, record.environment, *record.additional_environments)
        and options.status in (None, record.status)
        and (options.tag is None or options.tag in record.tags)
    )


def _sort(summaries: list[RunSummary], key: str) -> list[RunSummary]:
    if key == "name":
        return sorted(summaries, key=lambda summary: summary.record.title)
    get_value = SORT_VALUES[key]
    with_value = [summary for summary in summaries if get_value(summary) is not None]
    without_value = [summary for summary in summaries if get_value(summary) is None]
    return sorted(with_value, key=get_value, reverse=True) + without_value


# Lines after the first one of a run are indented by the width of its id.
INDENT = " " * 10
MAX_NAME_WIDTH = 15


def render_runs(rows: Sequence[Json], num_matching: int, num_total: int) -> RenderableType:
    """Return the list of runs.

    Args:
        rows: The runs that are shown, as `RunSummary.to_payload` returns them, with `differing`.
        num_matching: How many runs there are with the same filters.
        num_total: How many runs there are in all.
    """
    if not num_total:
        return Text("no runs yet; start one with `lachesis train ENV` or `lachesis demo`")
    if not rows:
        return Text(f"none of the {num_total} runs is one of those that you asked for")
    names = [shorten_middle(row["name"] or row["environment"], MAX_NAME_WIDTH) for row in rows]
    widths = (max(11, *map(len, names)), max(len(row["status"]) for row in rows))
    header = f"{'run':8}  {'environment':{widths[0]}}  {'status':{widths[1]}}  "
    lines = [Text(f"{header}{'steps':>9}  {'reward':13}  held out", style="bold")]
    for row, name in zip(rows, names, strict=True):
        lines += _render_run(row, name, widths)
    if len(rows) < num_matching:
        lines.append(
            Text(f"{len(rows)} of {num_matching} runs; --limit {num_matching} shows all", "dim")
        )
    return Group(*lines)


def _render_run(row: Json, name: str, widths: tuple[int, int]) -> list[Text]:
    line = Text(f"{row['run_id']}  {name:{widths[0]}}  ", no_wrap=True)
    style = STATUS_STYLES.get(row["status"], "cyan")
    line.append(f"{row['status']:{widths[1]}}  ", style=style)
    steps = f"{row['step']}/{row['total_steps']}"
    line.append(f"{steps:>9}  {_describe_reward(row['reward']):13}  {_describe_held_out(row)}")
    lines = [line]
    stalled, learning = row["stalled"], row["learning"]
    # Nothing is shown in green while a run stands still.
    judgement = Text(learning, style="" if stalled else HEALTH_STYLES.get(learning, ""))
    if row["evidence"]:
        judgement.append(f": {row['evidence']}", style="dim")
    details = [("", "dim", _list_facts(row)), ("", "", _describe_differences(row))]
    details += [("note: ", "", row["note"]), ("", "red", localize_times(stalled or ""))]
    lines += [Text(prefix + text, style=style) for prefix, style, text in details if text]
    lines.append(judgement)
    for extra in lines[1:]:
        extra.no_wrap, extra.overflow = True, "ellipsis"
    return [lines[0], *(Text(INDENT, no_wrap=True, overflow="ellipsis").append_text(extra)
                        for extra in lines[1:])]  # fmt: skip


def _list_facts(row: Json) -> str:
    facts = [format_local_time(row["created_at"])]
    if row["duration_s"] is not None:
        facts.append(format_duration(row["duration_s"]))
    if row["name"]:
        facts.append(row["environment"])
    facts.append(shorten_middle(Path(row["model"]).name, 30))
    facts += [f"#{tag}" for tag in row["tags"]]
    return " · ".join(facts)


def _describe_differences(row: Json) -> str:
    """Return the settings in which the shown runs differ, but the model, which each line names."""
    return " ".join(
        f"{name}={shorten_middle(str(value), 24)}"
        for name, value in row["differing"].items()
        if name != "model"
    )


def _describe_reward(reward: Json) -> str:
    if not reward or reward["last"] is None:
        return ""
    first = "?" if reward["first"] is None else f"{reward['first']:.3f}"
    return f"{first} → {reward['last']:.3f}"


def _describe_held_out(row: Json) -> str:
    point = row["held_out"]
    if point is None:
        return ""
    return describe_share(point["percent_correct"], point["low"], point["high"])
