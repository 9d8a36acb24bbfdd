"""Run `lachesis compare`: show runs side by side."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lachesis.base.errors import ArgumentsError
from lachesis.base.formatting import format_duration, format_reward, format_setting
from lachesis.cli.options import Output, Runs
from lachesis.cli.terminal import console, draw_sparkline, print_answer
from lachesis.operations.runs import get_run
from lachesis.reporting.comparison import ComparedRun, Comparison, compare_runs
from lachesis.reporting.run_summary import get_model_name
from lachesis.reporting.verdict_marks import choose_mark
from lachesis.runs.held_out_results import describe_share
from lachesis.runs.store import RunStore

# Columns that the names of the rows and one run take at least.
NAME_WIDTH, RUN_WIDTH = 16, 19
MAX_CURVE_WIDTH = 40


def compare(runs: Runs, /, *, options: Output = Output()) -> None:
    """Print what distinguishes several runs in settings and results."""
    if len(runs) < 2:
        raise ArgumentsError(
            f"one run ({runs[0]}) cannot be compared; name two or more, as in `lachesis compare "
            f"{runs[0]} @last`"
        )
    store = RunStore()
    comparison = compare_runs(store, [get_run(store, run) for run in runs])
    print_answer(options, comparison.to_payload(), render_comparison(comparison))


def list_rows(comparison: Comparison) -> list[list[str]]:
    """Return a row per property, with its name and its text for each run."""
    runs = comparison.runs
    rows = [
        ["environment", *(run.record.environment for run in runs)],
        ["model", *(get_model_name(run.record) for run in runs)],
        ["status", *(run.record.status for run in runs)],
        ["steps", *(f"{run.summary.step} of {run.record.total_steps}" for run in runs)],
        ["first reward", *(_format_reward(run, "first") for run in runs)],
        ["last reward", *(_format_reward(run, "last") for run in runs)],
        ["held out", *(_describe_held_out(run) for run in runs)],
        ["verdict", *(choose_mark(run.record).word for run in runs)],
        ["took", *(_describe_duration(run) for run in runs)],
        *(
            [name, *(_format_setting(run, key) for run in runs)]
            for name, key in comparison.differing.items()
            if name != "model"
        ),
        ["tags", *(" ".join(run.record.tags) for run in runs)],
        ["note", *(run.record.note or "" for run in runs)],
    ]
    return [row for row in rows if any(row[1:])]


def render_comparison(comparison: Comparison) -> RenderableType:
    """Return the table of runs, in blocks that fit the terminal, with curves and the verdict."""
    rows = list_rows(comparison)
    per_block = max(1, (console.width - NAME_WIDTH) // (RUN_WIDTH + 2))
    num_runs = len(comparison.runs)
    parts: list[RenderableType] = []
    for start in range(0, num_runs, per_block):
        block = comparison.runs[start : start + per_block]
        columns = [[row[0], *row[1 + start : 1 + start + per_block]] for row in rows]
        parts += [_render_block(block, columns), Text()]
    parts.append(Text(comparison.verdict))
    if not comparison.differing:
        parts.append(Text("All settings of these runs are equal."))
    return Group(*parts)


def _render_block(runs: Sequence[ComparedRun], rows: Sequence[Sequence[str]]) -> Table:
    """Return some runs side by side: the rows, and below them sparklines of both curves."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", style="bold", no_wrap=True)
    for run in runs:
        table.add_column(run.label, overflow="fold", min_width=RUN_WIDTH)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    width = min(MAX_CURVE_WIDTH, max(RUN_WIDTH, (console.width - NAME_WIDTH) // len(runs) - 2))
    for name, curves in (
        ("reward", [_list_rewards(run) for run in runs]),
        ("held out", [[point.percent_correct for point in run.curve] for run in runs]),
    ):
        if any(len(curve) > 1 for curve in curves):
            table.add_row(name, *(Text(draw_sparkline(curve, width)) for curve in curves))
    return table


def _list_rewards(run: ComparedRun) -> list[float | None]:
    return [step.get("reward/mean") for step in run.steps]


def _format_reward(run: ComparedRun, which: str) -> str:
    if not run.summary.reward:
        return ""
    return format_reward(run.summary.reward[which])


def _format_setting(run: ComparedRun, key: str) -> str:
    if key not in run.summary.settings:
        return "–"
    return format_setting(run.summary.settings[key])


def _describe_held_out(run: ComparedRun) -> str:
    point = run.held_out
    if point is None:
        return ""
    share = describe_share(point)
    items = "" if point.items is None else f", {point.items} items"
    return f"{share}{items}, step {point.step}"


def _describe_duration(run: ComparedRun) -> str:
    if run.summary.duration_s is None:
        return ""
    return format_duration(run.summary.duration_s)
