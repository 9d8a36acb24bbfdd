"""Show what a judgement that calls for a look is about: curves, the step, and what became of
rollouts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lachesis.reporting.marks import needs_a_look
from lachesis.reporting.verdict import RunVerdict
from lachesis.runs.metrics import Step
from lachesis.runs.record import RunRecord
from lachesis.web.charts import Chart

# Steps whose rollouts are counted, as many as a judgement looks at.
COUNTED_STEPS = 20
MAX_CHARTS = 3
_SINCE = re.compile(r"\bsince step (\d+)")
# Curves that stand beside another one because they tell the same story.
_COMPANIONS = {"raised": "invalid"}


@dataclass(frozen=True)
class OutcomeRow:
    """Hold how many of the last rollouts ended the same way."""

    name: str
    count: int
    share: float
    """Share of all rollouts of these steps, from 0 to 1."""


@dataclass(frozen=True)
class Trouble:
    """Hold what shows why a run needs a look."""

    charts: list[Chart]
    since: int | None
    """The step from which on it went wrong, if the judgement names one."""
    outcomes: list[OutcomeRow]
    num_steps: int
    """How many of the last steps the outcomes are of."""


def find_first_bad_step(record: RunRecord) -> int | None:
    """Return the step from which on a run went wrong, if its judgement names one."""
    if not needs_a_look(record):
        return None
    evidence = " ".join(map(str, (record.health or {}).get("evidence", [])))
    match = _SINCE.search(evidence)
    return int(match[1]) if match else None


def describe_trouble(
    record: RunRecord,
    verdict: RunVerdict,
    charts: Sequence[Chart],
    steps: Sequence[Step],
    group_size: int,
) -> Trouble | None:
    """Return what shows why a run needs a look; None if it needs none, or nothing shows it.

    Args:
        record: The run.
        verdict: What its page says of it.
        charts: The curves that its page has.
        steps: Its metrics.
        group_size: Rollouts of a group.
    """
    if not needs_a_look(record) or not steps:
        return None
    named = [verdict.lead_chart, *(finding.chart for finding in verdict.findings)]
    names = [*named, *(_COMPANIONS.get(name, "") for name in named)]
    shown = [chart for name in dict.fromkeys(names) for chart in charts if chart.name == name]
    last_steps = steps[-COUNTED_STEPS:]
    outcomes = count_outcomes(last_steps, group_size)
    if not shown and len(outcomes) < 2:
        return None
    return Trouble(shown[:MAX_CHARTS], find_first_bad_step(record), outcomes, len(last_steps))


def count_outcomes(steps: Sequence[Step], group_size: int) -> list[OutcomeRow]:
    """Return what became of the rollouts of some steps, the most frequent first."""
    num_scored = _sum(steps, "batch/rollouts")
    num_right = round(
        sum(
            (step.get("train/percent_correct") or 0) * (step.get("batch/rollouts") or 0)
            for step in steps
        )
    )
    counts = {
        "right": num_right,
        "scored 0 or less": num_scored - num_right,
        "the environment raised": group_size * _sum(steps, "rollouts/raised"),
        "without a usable score": _sum(steps, "rollouts/invalid"),
        "left out by the environment": _sum(steps, "rollouts/dropped"),
    }
    total = sum(counts.values())
    rows = [OutcomeRow(name, count, count / total) for name, count in counts.items() if count]
    return sorted(rows, key=lambda row: row.count, reverse=True)


def _sum(steps: Sequence[Step], metric: str) -> int:
    return round(sum(step.get(metric) or 0 for step in steps))
