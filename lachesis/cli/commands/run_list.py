"""Run `runs`: list the matching runs with the settings in which they differ."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.argparse_types import NUM_RUNS
from lachesis.base.errors import ArgumentsError
from lachesis.base.formatting import format_duration, format_reward
from lachesis.base.json_text import Json
from lachesis.cli import terminal
from lachesis.cli.options import Output, number, options_class
from lachesis.cli.terminal import (
    STATUS_STYLES,
    TONE_STYLES,
    format_local_time,
    localize_times,
    print_answer,
    shorten_middle,
)
from lachesis.operations.run_lists import list_runs_with_warning
from lachesis.reporting.run_summary import RunSummary, find_differing_settings, summarize_run
from lachesis.reporting.verdict_marks import make_mark
from lachesis.runs.held_out_results import HeldOutPoint, describe_share
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
    """Return whether a run matches the options."""
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
MIN_NAME_WIDTH = 11


def render_runs(rows: Sequence[Json], num_matching: int, num_total: int) -> RenderableType:
    """Return the list of runs as it is printed, with a line per run.

    Args:
        rows: The runs that are shown, as `RunSummary.to_payload` returns them, with `differing`.
        num_matching: How many runs there are with the same filters.
        num_total: How many runs there are in all.
    """
    if not num_total:
        return Text("no runs yet; start one with `lachesis train ENV` or `lachesis demo`")
    if not rows:
        return Text(f"none of the {num_total} runs is one of those that you asked for")
    table = _make_table(rows)
    lines = [_make_line(table[0], "bold", "bold")]
    for row, cells in zip(rows, table[1:], strict=True):
        lines += _render_run(row, cells)
    if len(rows) < num_matching:
        lines.append(
            Text(f"{len(rows)} of {num_matching} runs; --limit {num_matching} shows all", "dim")
        )
    return Group(*lines)


def _make_table(rows: Sequence[Json]) -> list[list[str]]:
    """Return the head and the first line of each run as cells, each column of one width."""
    table = [["run", "environment", "status", "steps", "reward", "held out"]]
    table += [
        [
            row["run_id"],
            row["name"] or row["environment"],
            row["status"],
            f"{row['step']}/{row['total_steps']}",
            _describe_reward(row["reward"]),
            _describe_held_out(row),
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    # Long numbers take their room from the names, which the ids stand for.
    room = terminal.console.width - sum(widths) + widths[1] - 2 * (len(widths) - 1)
    widths[1] = max(MIN_NAME_WIDTH, min(widths[1], room))
    return [
        [
            shorten_middle(cell, width).ljust(width)
            for cell, width in zip(cells, widths, strict=True)
        ]
        for cells in table
    ]


def _make_line(cells: Sequence[str], style: str, status_style: str) -> Text:
    line = Text(f"{cells[0]}  {cells[1]}  ", style=style, no_wrap=True)
    line.append(f"{cells[2]}  ", style=status_style)
    line.append("  ".join(cells[3:]).rstrip())
    return line


def _render_run(row: Json, cells: Sequence[str]) -> list[Text]:
    """Return the lines of one run in a list: its numbers, its facts and its verdict."""
    lines = [_make_line(cells, "", STATUS_STYLES.get(row["status"], "cyan"))]
    judgement = Text(row["verdict"], style=TONE_STYLES[make_mark(row["verdict"]).tone])
    if row["reason"]:
        judgement.append(f": {localize_times(row['reason'])}", style="dim")
    details = [("dim", _list_facts(row)), ("", _describe_differences(row))]
    details.append(("", row["note"] and f"note: {row['note']}"))
    extra_lines = [*(Text(text, style=style) for style, text in details if text), judgement]
    for extra in extra_lines:
        extra.no_wrap, extra.overflow = True, "ellipsis"
        lines.append(Text(INDENT, no_wrap=True, overflow="ellipsis").append_text(extra))
    return lines


def _list_facts(row: Json) -> str:
    """Return when a run was made, its time, environment, model and tags on one line."""
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
    return f"{format_reward(reward['first'])} → {format_reward(reward['last'])}"


def _describe_held_out(row: Json) -> str:
    return describe_share(HeldOutPoint(**row["held_out"])) if row["held_out"] else ""
