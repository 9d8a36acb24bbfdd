"""What became of a rollout: a score, a zero with its reason, or nothing that could be scored.

A failure that the policy cannot have caused (a server, a disk, a verifier with a bug) must not
teach it anything: such a rollout is invalid. It is counted by its reason, and no token of it is
trained on. Whatever the policy did cause, a program that runs for ever or an answer that cannot be
read, is a zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lachesis.base.numbers import is_score


class Invalid(Exception):
    """Raise it while scoring when the answer is not to blame. The text is what it is counted as:
    keep it short, and leave out what differs from rollout to rollout.
    """


class AllInvalid(Invalid):
    """Raised for a group without a valid rollout; `rollout_reasons` holds the reason of each."""

    def __init__(self, rollout_reasons: Sequence[str]) -> None:
        self.rollout_reasons = tuple(rollout_reasons)
        reasons = "; ".join(dict.fromkeys(self.rollout_reasons))[:300]
        super().__init__(f"all {len(self.rollout_reasons)} rollouts are invalid: {reasons}")


@dataclass(frozen=True)
class Outcome:
    """`reward` is None for an invalid rollout. `parts` are the rewards that it is the sum of, by
    name.
    """

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    """Of a zero or of an invalid rollout, as it is counted."""

    @property
    def is_valid(self) -> bool:
        return self.reward is not None


def is_solution(reward: float, threshold: float) -> bool:
    """Whether a reward is at least `solved`; parts may add up to a little less than the whole."""
    return reward >= threshold * (1 - 1e-9)


def zero(reason: str) -> Outcome:
    """A reward of 0 that is counted as this, for what the policy has caused."""
    return Outcome(0.0, reason=reason)


def build_invalid(reason: str) -> Outcome:
    return Outcome(None, reason=reason or "Invalid was raised without a reason")


def to_outcome(value: Any) -> Outcome:
    """What a scoring function gave, as an outcome: a number, true or false, numbers by name (the
    reward is their sum), or an outcome. Anything else is invalid, and so are NaN and infinity.
    """
    if isinstance(value, Outcome):
        return value
    if isinstance(value, Mapping):
        invalid_part = next((name for name, part in value.items() if not is_score(part)), None)
        if invalid_part is not None:
            return build_invalid(
                f"the score {str(invalid_part)[:40]} is {_describe_value(value[invalid_part])}"
            )
        parts = {str(name): float(part) for name, part in value.items()}
        return Outcome(sum(parts.values()), parts)
    return (
        Outcome(float(value))
        if is_score(value)
        else build_invalid(f"the score is {_describe_value(value)}")
    )


def _describe_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value}"
    return "None" if value is None else f"a {type(value).__name__}, not a number"
