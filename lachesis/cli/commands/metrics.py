"""Print the metrics of a run: the main ones as a table, or all of them as CSV.

`metrics.jsonl` holds a line again where a resumed run has made a step again, or where a result
came late. Here each step stands once, in order, with its last values.
"""

import csv
import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lachesis.base.formatting import format_reward
from lachesis.cli.options import Output, Run
from lachesis.cli.terminal import print_answer
from lachesis.operations.runs import read_metrics
from lachesis.runs.metrics import Step, sample_history
from lachesis.runs.store import RunStore

TABLE_STEPS = 20
TABLE_METRICS = {
    "reward/mean": "reward",
    "eval/percent_correct": "held out",
    "train/loss": "loss",
    "entropy/sampling": "entropy",
    "length/mean": "tokens",
    "time/step": "seconds",
}


def metrics(
    run: Run,
    /,
    *,
    csv: Annotated[
        bool,
        Parameter(
            help="print all metrics of all steps as CSV, one line per step; empty where there is "
            "none"
        ),
    ] = False,
    options: Output = Output(),
) -> None:
    """Print the metrics of a run."""
    steps = read_metrics(RunStore(), run)
    if csv:
        write_csv(steps)
        return
    answer = {"run_id": run, "steps": steps, "count": len(steps)}
    print_answer(options, answer, _make_table(run, sample_history(steps, TABLE_STEPS)))


def write_csv(steps: Sequence[Step]) -> None:
    """Write the steps to the standard output.

    The first columns are `step` and `time` (seconds since the epoch), the others are sorted by
    name. A value that was not a finite number is empty.
    """
    names = sorted({name for step in steps for name in step} - {"step", "time"})
    writer = csv.DictWriter(sys.stdout, ["step", "time", *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows(steps)


def _make_table(run_id: str, steps: Sequence[Step]) -> RenderableType:
    """Return the steps of a run as a table of its main metrics."""
    if not steps:
        return Text(f"run {run_id} has no steps yet")
    shown = {
        name: title
        for name, title in TABLE_METRICS.items()
        if any(step.get(name) is not None for step in steps)
    }
    table = Table("step", *shown.values(), box=None, header_style="dim")
    for step in steps:
        values = [step.get(name) for name in shown]
        table.add_row(
            str(step["step"]), *("" if value is None else format_reward(value) for value in values)
        )
    return table
