"""Format the list of runs for a terminal: a few lines per run that fit 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.formatting import format_duration
from lachesis.base.json_text import Json
from lachesis.cli.console import (
    HEALTH_STYLES,
    STATUS_STYLES,
    format_local_time,
    localize_times,
    shorten_middle,
)
from lachesis.runs.held_out_results import describe_share

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
