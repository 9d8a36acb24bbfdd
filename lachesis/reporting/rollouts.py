"""Answer questions about rollouts and held-out answers for every surface."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lachesis.base.json_text import Json, read_json_lines
from lachesis.base.reward_values import is_score
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import find_held_out_answers
from lachesis.web.token_text import Segment, split_answer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# Names under which environments write the item, what it expects, and what the model answered.
PROMPT_NAMES = ("question", "prompt", "problem", "item")
EXPECTED_NAMES = (
    "answer", "expected", "target", "solution", "gold", "gold_answer", "label", "ground_truth"
)  # fmt: skip
ANSWER_NAMES = ("model_answer", "response", "model_response", "completion", "output")


@dataclass(frozen=True)
class HeldOutGroup:
    """Hold the answers to one held-out item."""

    number: int
    """Its place among the items of the evaluation, from 0."""
    prompt: str
    expected: str | None
    answers: list[str]
    scores: list[float]

    @property
    def num_right(self) -> int:
        """Return how many answers are right."""
        return sum(score > 0 for score in self.scores)

    @property
    def mean(self) -> float:
        """Return the mean score."""
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True)
class HeldOutList:
    """Hold the items of one evaluation, those with wrong answers first."""

    title: str
    """Says whose answers they are, as in `after step 40`."""
    groups: list[HeldOutGroup]


def read_held_out_lists(run_dir: RunDir, text: str = "") -> dict[str, HeldOutList]:
    """Return the recorded answers `before` and `after` training; see `find_held_out_answers`."""
    return {
        when: HeldOutList(title, read_held_out_groups(read_json_lines(file), text))
        for when, (title, file) in find_held_out_answers(run_dir).items()
    }


def read_held_out_groups(samples: Sequence[Json], text: str = "") -> list[HeldOutGroup]:
    """Return the items of an evaluation, those with wrong answers first.

    Args:
        samples: The lines that the evaluation has kept; those without a score are left out.
        text: Only items with this text in the prompt or an answer, without regard to case.
    """
    groups: dict[tuple[str, str | None], HeldOutGroup] = {}
    for sample in samples:
        prompt = _find_text(sample, PROMPT_NAMES)
        if prompt is None or not is_score(sample.get("score")):
            continue
        expected = _find_text(sample, EXPECTED_NAMES)
        group = groups.setdefault(
            (prompt, expected), HeldOutGroup(len(groups), prompt, expected, [], [])
        )
        group.answers.append(_find_text(sample, ANSWER_NAMES) or "")
        group.scores.append(float(sample["score"]))
    lowered_text = text.casefold()
    matching = [
        group
        for group in groups.values()
        if not lowered_text
        or any(lowered_text in part.casefold() for part in (group.prompt, *group.answers))
    ]
    return sorted(matching, key=lambda group: (group.mean, group.number))


def _find_text(sample: Json, names: Sequence[str]) -> str | None:
    for name in names:
        if name in sample:
            return _to_text(sample[name])
    return None


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


BAR_WIDTH = 96.0
# Up to so many sampled tokens are drawn large.
MAX_LARGE_TOKENS = 4


@dataclass(frozen=True)
class AnswerColumn:
    """Hold one distinct answer with its score, its count and its tokens."""

    text: str
    count: int
    """How many rollouts of the group have this answer."""
    score: float | None
    reason: str
    advantage: float | None
    bar_start: float
    bar_width: float
    """Where the bar of the advantage begins and how wide it is, of 96."""
    segments: list[Segment]
    parts: dict[str, float]
    num_tokens: int
    logprob: float | None
    outcome: str
    weights_version: int | None
    is_large: bool

    @property
    def tone(self) -> str:
        """Return whether the answer is better or worse than its group: up, down or level."""
        reference = self.advantage
        if reference is None:
            reference = 0.0 if self.score is None else (1.0 if self.score > 0 else -1.0)
        if abs(reference) < 1e-9:
            return "level"
        return "up" if reference > 0 else "down"


def build_answers(
    rows: Sequence[Json], tokenizer: Tokenizer | None, *, by_difference: bool = False
) -> list[AnswerColumn]:
    """Return the answers of a group, worst first; equal answers with equal scores appear once."""
    # Of sixteen answers often two or three are different.
    merged: dict[tuple[Any, ...], list[Json]] = {}
    for row in rows:
        merged.setdefault((row["answer"], row["score"], row["outcome"]), []).append(row)
    largest = max((abs(row["advantage"] or 0.0) for row in rows), default=0.0)
    columns = [
        _make_column(same, tokenizer, largest, by_difference=by_difference)
        for same in merged.values()
    ]
    return sorted(columns, key=lambda column: (column.score is not None, column.score or 0.0))


def _make_column(
    rows: Sequence[Json], tokenizer: Tokenizer | None, largest: float, *, by_difference: bool
) -> AnswerColumn:
    """Return equal answers as one column, with its bar and its coloured tokens."""
    row = rows[0]
    segments = split_answer(row, tokenizer, by_difference=by_difference) if tokenizer else []
    logprobs = [value for value in row.get("logprobs") or [] if value is not None]
    num_tokens = sum(bool(is_sampled) for is_sampled in row.get("sampled") or [])
    advantage = row["advantage"]
    length = BAR_WIDTH / 2 * abs(advantage or 0.0) / largest if largest else 0.0
    return AnswerColumn(
        text=row["answer"] or "",
        count=len(rows),
        score=row["score"],
        reason=_describe_reason(row),
        advantage=advantage,
        bar_start=BAR_WIDTH / 2 - (length if (advantage or 0.0) < 0 else 0.0),
        bar_width=length,
        segments=segments,
        parts=row.get("parts") or {},
        num_tokens=num_tokens,
        logprob=sum(logprobs) if logprobs else None,
        outcome=row["outcome"],
        weights_version=row.get("weights_version"),
        is_large=bool(segments) and len(segments) == 1 and num_tokens <= MAX_LARGE_TOKENS,
    )


def _describe_reason(row: Json) -> str:
    """Return why a rollout has its score, in words."""
    if row.get("reason"):
        return str(row["reason"])
    score, outcome = row["score"], row["outcome"]
    if score is None:
        return "no score"
    if outcome in ("truncated", "too long"):
        return str(outcome)
    return "right" if score > 0 else "wrong"


def read_item_facts(item: str | None, prompt: str) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the expected answer of an item, and its other values that the prompt does not show.

    Args:
        item: The item as JSON.
        prompt: The text that the model was given.
    """
    try:
        values = json.loads(item or "")
    except ValueError:
        return None, [("item", item)] if item else []
    if not isinstance(values, dict):
        return None, [("item", str(values))]
    expected_name = next((name for name in EXPECTED_NAMES if name in values), None)
    expected = None if expected_name is None else _write(values[expected_name])
    others = [
        (str(name), _write(value))
        for name, value in values.items()
        if name != expected_name and _write(value) not in prompt
    ]
    return expected, others


def _write(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
