"""Say by how much one held-out result differs from another, and whether the items show it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lachesis.base.confidence_intervals import newcombe_interval, paired_interval
from lachesis.base.json_text import read_json_lines
from lachesis.reporting.rollouts import read_held_out_groups
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import HeldOutPoint, find_held_out_answers

# The share of right answers to each held-out item, by its prompt and what it expects.
ItemShares = Mapping[tuple[str, str | None], float]


@dataclass(frozen=True)
class Difference:
    """Hold the difference of two shares of right answers, with its 95 % interval."""

    value: float
    low: float | None = None
    """None, as `high`, where a number of items is not known."""
    high: float | None = None
    is_paired: bool = False
    """Whether the answers to the same items were compared one by one."""

    @property
    def is_seen(self) -> bool:
        """Return whether the interval leaves out 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def describe(self) -> str:
        """Return the difference with its interval, as in `0.150 (0.013 to 0.279)`."""
        text = f"{self.value:.3f}"
        if self.low is not None and self.high is not None:
            text += f" ({self.low:.3f} to {self.high:.3f})"
        return text.replace("-", "−")


def compare_results(
    first: HeldOutPoint,
    second: HeldOutPoint,
    first_shares: ItemShares | None = None,
    second_shares: ItemShares | None = None,
) -> Difference:
    """Return the second share of right answers minus the first, with its 95 % interval.

    Shares of the same items vary together, so that a comparison item by item sees smaller
    differences; without the answers to each item the interval of two independent shares is taken.

    Args:
        first: A held-out result.
        second: Another one.
        first_shares: The share of right answers to each item of the first result, if kept.
        second_shares: The same of the second one.
    """
    value = second.percent_correct - first.percent_correct
    if not first.items or not second.items:
        return Difference(value)
    pairs = _pair(first, second, first_shares or {}, second_shares or {})
    if interval := paired_interval(pairs):
        return Difference(value, *interval, is_paired=True)
    shares = (second.percent_correct, first.percent_correct)
    if not all(0 <= share <= 1 for share in shares):
        return Difference(value)
    interval = newcombe_interval(shares[0], second.items, shares[1], first.items)
    return Difference(value, *interval)


def _pair(
    first: HeldOutPoint, second: HeldOutPoint, first_shares: ItemShares, second_shares: ItemShares
) -> list[float]:
    """Return the difference of each item, or nothing if the items are not those of the results."""
    if first_shares.keys() != second_shares.keys():
        return []
    for point, shares in ((first, first_shares), (second, second_shares)):
        # An environment may count as right what has a score of 0, or keep some answers only.
        if not shares or not math.isclose(
            sum(shares.values()) / len(shares), point.percent_correct, abs_tol=1e-4
        ):
            return []
    return [second_shares[item] - share for item, share in first_shares.items()]


def read_item_shares(run_dir: RunDir) -> dict[str, ItemShares]:
    """Return the share of right answers to each item, `before` and `after` training, as kept."""
    return {
        when: _compute_shares(file) for when, (_, file) in find_held_out_answers(run_dir).items()
    }


def _compute_shares(file: Path) -> ItemShares:
    return {
        (group.prompt, group.expected): group.num_right / len(group.scores)
        for group in read_held_out_groups(read_json_lines(file))
    }
