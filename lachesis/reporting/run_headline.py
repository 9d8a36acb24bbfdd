"""Say in one sentence how a run went, with its mark, and what shows its trouble.

The word is that of the run's record; nothing here judges. A sentence says no more than the held-out
intervals allow.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lachesis.base.formatting import format_percent, format_reward
from lachesis.reporting.charts import Chart
from lachesis.reporting.held_out_difference import Difference, ItemShares, compare_results
from lachesis.reporting.verdict_marks import Mark, choose_mark, needs_a_look
from lachesis.runs.held_out_results import HeldOutPoint, split_curve
from lachesis.runs.metrics import Step
from lachesis.runs.record import RunRecord

MAX_FINDINGS = 4
# The folders before the name of a file, as in `/folder/of/tasks/sums.py:12`.
_FOLDERS = re.compile(r"(?<![\w/:.])/(?:[^\s/`'\"]+/)+(?=[^\s/]+\.\w)")


@dataclass(frozen=True)
class VerdictReason:
    """Hold one reason of a verdict, with the name of the curve that shows it."""

    text: str
    chart: str = ""


@dataclass(frozen=True)
class HeldOutEvidence:
    """Hold the held-out results before and after training, and both in words."""

    before: HeldOutPoint | None
    after: HeldOutPoint | None
    change: Difference | None
    """The result after training less that before it, if both are known."""
    text: str


@dataclass(frozen=True)
class RunVerdict:
    """Hold the verdict on a run as its page begins."""

    mark: Mark
    lead: str
    """The verdict in a few words."""
    lead_rest: str
    """The result in numbers, or what is wrong."""
    result: str
    """What the steps have changed, in numbers; nothing without a step."""
    lead_chart: str
    """The name of the curve that shows what needs a look, or nothing."""
    held_out: HeldOutEvidence | None
    findings: list[VerdictReason]
    advice: list[str]


# Words of the evidence of a judgement, and the curve that shows what they are about.
_CHARTS_BY_WORD = {
    "without a signal": "silent",
    "usable score": "raised",
    "log-probabilities differ": "gap",
    "entropy": "entropy",
    "truncated": "truncated",
    "mean reward": "reward",
    "reward": "reward",
    "gradient": "gradient",
    "updates behind": "staleness",
    "weights": "gradient",
}


def describe_verdict(
    record: RunRecord,
    step: int,
    reward: dict[str, float | None],
    curve: Sequence[HeldOutPoint],
    shares: Mapping[str, ItemShares] | None = None,
) -> RunVerdict:
    """Return the verdict on a run.

    Args:
        record: The run.
        step: The last step that was made.
        reward: The first and the last mean reward.
        curve: The held-out results by step.
        shares: The share of right answers to each held-out item, `before` and `after`, as kept.
    """
    held_out = _describe_held_out(curve, shares or {})
    result = _describe_result(step, reward, held_out)
    lead, lead_rest = _write_lead(record, result)
    # What the first line says already is not said again.
    sentences = [
        sentence for sentence in _list_evidence(record) if sentence not in f"{lead} {lead_rest}"
    ]
    advice = (record.health or {}).get("advice", [])
    return RunVerdict(
        mark=choose_mark(record),
        lead=lead,
        lead_rest=lead_rest,
        result=result,
        lead_chart=_find_chart(lead_rest) if needs_a_look(record) else "",
        held_out=held_out,
        findings=[VerdictReason(text, _find_chart(text)) for text in sentences[:MAX_FINDINGS]],
        advice=[write_sentence(str(sentence)) for sentence in advice],
    )


def _list_evidence(record: RunRecord) -> list[str]:
    """Return the evidence as sentences, the newest and worst news first."""
    evidence = [str(sentence) for sentence in (record.health or {}).get("evidence", [])]
    news = [record.error, record.stall_text, *evidence]
    return [write_sentence(text) for text in dict.fromkeys(news) if text]


def _write_lead(record: RunRecord, result: str) -> tuple[str, str]:
    """Return the first line in two parts, the first of which is bold.

    Args:
        record: The run.
        result: What the steps have changed.
    """
    mark = choose_mark(record)
    first_evidence = write_sentence(record.evidence or "")
    if mark.word == "stalled":
        return "It stands still.", write_sentence(record.stall_text or "")
    if mark.word == "failed":
        return "It failed.", write_sentence((record.error or "").split("\n")[0])
    if mark.word == "broken":
        return "It is broken.", first_evidence or result
    if mark.word == "suspect":
        return "Have a look.", first_evidence or result
    if mark.word == "not learning":
        opening = "It has not learned." if record.has_ended else "It is not learning."
        return opening, result or first_evidence
    if mark.word == "healthy":
        return ("It learned." if record.has_ended else "It is learning."), result
    if record.has_ended:
        return "It ended before it could be judged.", result
    return "Too early to tell.", result or f"It is {record.phase}."


def _describe_result(
    step: int, reward: dict[str, float | None], held_out: HeldOutEvidence | None
) -> str:
    """Return the change of reward and held-out accuracy; an empty string without a step."""
    first, last = reward.get("first"), reward.get("last")
    if not step or first is None or last is None:
        return ""
    steps = "one step" if step == 1 else f"{step:,} steps"
    if last > first:
        text = f"In {steps} the reward rose from {format_reward(first)} to {format_reward(last)}"
    elif last < first:
        text = f"In {steps} the reward fell from {format_reward(first)} to {format_reward(last)}"
    else:
        text = f"In {steps} the reward stayed at {format_reward(last)}"
    if held_out is None or held_out.change is None or not (held_out.before and held_out.after):
        return f"{text}; no held-out result before and after says whether it generalizes."
    before, after = held_out.before.percent_correct, held_out.after.percent_correct
    shares = [format_percent(before), format_percent(after)]
    if shares[0] == shares[1]:
        shares = [format_reward(before), format_reward(after)]
    moved = f"held-out accuracy from {shares[0]} to {shares[1]}"
    if held_out.change.is_seen:
        return f"{text}, and {moved}."
    items = f"{held_out.after.items:,} items" if held_out.after.items else "these items"
    return f"{text}, and {moved}, which {items} cannot tell apart."


def _describe_held_out(
    curve: Sequence[HeldOutPoint], shares: Mapping[str, ItemShares]
) -> HeldOutEvidence | None:
    """Return both held-out results with their difference and a sentence; None without any."""
    before, after = split_curve(curve)
    if before is None and after is None:
        return None
    change = None
    if before is not None and after is not None:
        change = compare_results(before, after, shares.get("before"), shares.get("after"))
    parts = [
        f"{name} {_describe_share(point)}"
        for name, point in (("before", before), ("after", after))
        if point is not None
    ]
    text = f"Held out {', '.join(parts)}."
    items = (after or before or curve[0]).items
    if items:
        text += f" {items:,} items"
        if change is not None and change.low is not None:
            text += f"; the change is {change.describe()}"
            text += ", item by item" if change.is_paired else ""
        text += "."
    return HeldOutEvidence(before, after, change, text)


def _describe_share(point: HeldOutPoint) -> str:
    if point.low is None or point.high is None:
        return format_reward(point.percent_correct)
    return f"{point.percent_correct:.3f} ({point.low:.3f} to {point.high:.3f})"


def _find_chart(text: str) -> str:
    for words, chart in _CHARTS_BY_WORD.items():
        if words in text:
            return chart
    return ""


def write_sentence(text: str) -> str:
    """Return the text as a sentence with capital and full stop, without folders of this machine."""
    text = _FOLDERS.sub("", text.strip())
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?", "…")) else ".")


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
    """Hold the curves and counts that show why a run needs a look."""

    charts: list[Chart]
    since: int | None
    """The step from which on it went wrong, if the judgement names one."""
    outcomes: list[OutcomeRow]
    num_steps: int
    """How many of the last steps the outcomes are of."""


def find_first_bad_step(record: RunRecord) -> int | None:
    """Return the step at which a run went wrong; None if its judgement names no step."""
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
    """Return the curves and counts that show why a run needs a look; None if it needs none.

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
    """Return how many rollouts of some steps ended in each way, the most frequent first."""
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
