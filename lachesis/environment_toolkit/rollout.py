"""Represent the outcome of a rollout: a score, a zero with its reason, or an invalid rollout.

A failure that the policy cannot have caused (of a server, a disk, a verifier with a bug) must not
teach it anything: such a rollout is invalid. It is counted by its reason and never trained on. What
the policy did cause, such as a program that runs forever or an answer that cannot be parsed, is a
zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lachesis.base.reward_values import is_score


class Invalid(Exception):
    """Raise this while scoring when the answer is not to blame.

    Rollouts are counted by the text: keep it short, and leave out what differs between rollouts.
    """


class AllInvalid(Invalid):
    """A group has no valid rollout; `rollout_reasons` holds the reason of each."""

    def __init__(self, rollout_reasons: Sequence[str]) -> None:
        self.rollout_reasons = tuple(rollout_reasons)
        reasons = "; ".join(dict.fromkeys(self.rollout_reasons))[:300]
        super().__init__(f"all {len(self.rollout_reasons)} rollouts are invalid: {reasons}")


@dataclass(frozen=True)
class Outcome:
    """Hold the result of scoring one rollout."""

    reward: float | None
    """The reward, or None for an invalid rollout."""
    parts: dict[str, float] = field(default_factory=dict)
    """The parts whose sum is the reward, by name."""
    reason: str | None = None
    """Why the rollout is a zero or invalid; rollouts are counted by it."""

    @property
    def is_valid(self) -> bool:
        """Return whether the rollout can be trained on."""
        return self.reward is not None


def is_solution(reward: float, threshold: float) -> bool:
    """Return whether a reward reaches the threshold, allowing for rounding in a sum of parts."""
    return reward >= threshold - 1e-9 * abs(threshold)


def zero(reason: str) -> Outcome:
    """Return a reward of 0 with its reason, for a failure that the policy caused."""
    return Outcome(0.0, reason=reason)


def build_invalid(reason: str) -> Outcome:
    """Return an invalid outcome that is counted by its reason."""
    return Outcome(None, reason=reason or "Invalid was raised without a reason")


def to_outcome(value: Any) -> Outcome:
    """Convert the return value of a scoring function to an outcome.

    Numbers, booleans, mappings of names to numbers (the reward is their sum) and outcomes are
    accepted. Anything else is invalid, including NaN and infinity.
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
    if is_score(value):
        return Outcome(float(value))
    return build_invalid(f"the score is {_describe_value(value)}")


def _describe_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value}"
    if value is None:
        return "None"
    return f"a {type(value).__name__}, not a number"
