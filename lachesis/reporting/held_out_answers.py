"""Read the answers to held-out items that an evaluation has kept, item by item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lachesis.base.json_text import Json
from lachesis.base.reward_values import is_score

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


def read_held_out_groups(samples: Sequence[Json], text: str = "") -> list[HeldOutGroup]:
    """Return the items of an evaluation, those with wrong answers first.

    Args:
        samples: The lines that the evaluation has kept; those without a score are left out.
        text: Only items with this text in the prompt or an answer, without regard to case.
    """
    groups: dict[str, HeldOutGroup] = {}
    for sample in samples:
        prompt = _find_text(sample, PROMPT_NAMES)
        if prompt is None or not is_score(sample.get("score")):
            continue
        group = groups.setdefault(
            prompt, HeldOutGroup(len(groups), prompt, _find_text(sample, EXPECTED_NAMES), [], [])
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
