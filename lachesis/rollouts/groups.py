"""Find groups of rollouts of a run: those with wrong answers, without a signal, or of one item.

A group holds the rollouts of one item in one step. Here a rollout with a score above 0 is right,
one with a lower score is wrong, and one without a score could not be scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lachesis.base.errors import StorageError
from lachesis.base.json_text import Json
from lachesis.rollouts.parquet_files import COLUMNS, RolloutFile, list_rollout_files, scan_rollouts

if TYPE_CHECKING:
    import polars as pl

Ask = Literal["", "wrong", "all_wrong", "all_right", "silent", "unscored", "repeated"]
GroupOrder = Literal["newest", "oldest", "worst"]
UNSCORED_OUTCOMES = ("invalid", "dropped", "refused")


@dataclass(frozen=True)
class GroupQuery:
    """Say which groups are looked for."""

    ask: Ask = ""
    """Some answers wrong, all wrong, all right, without a signal, without a score, or of an item
    that comes more than once.
    """
    first_step: int | None = None
    last_step: int | None = None
    reason: str = ""
    environment: str = ""
    item: str = ""
    """Only those of the item with this key."""
    order: GroupOrder = "newest"
    first: int = 0
    """How many of the first matching groups are left out."""
    limit: int = 20


@dataclass(frozen=True)
class RolloutGroup:
    """Hold the numbers of one group for a list."""

    step: int
    group: int
    environment: str
    item_key: str
    prompt: str
    scores: list[float]
    """The scores of those that have one, the lowest first."""
    num_rollouts: int
    mean: float | None
    """The mean score, or None where none has a score."""

    @property
    def num_right(self) -> int:
        """Return how many answers are right."""
        return sum(score > 0 for score in self.scores)


class GroupTable:
    """Hold a line per group of a run, read once from its files."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self.frame = frame

    @property
    def num_groups(self) -> int:
        """Return how many groups are kept."""
        return len(self.frame)

    def find(self, query: GroupQuery) -> tuple[list[RolloutGroup], int]:
        """Return the groups that a query asks for, and how many match in all."""
        matching = _order_groups(self._filter(query), query.order)
        rows = matching.slice(query.first, query.limit).to_dicts()
        names = RolloutGroup.__dataclass_fields__
        groups = [RolloutGroup(**{name: row[name] for name in names}) for row in rows]
        return groups, len(matching)

    def count(self, ask: Ask, query: GroupQuery) -> int:
        """Return how many groups answer a question, with the other filters of a query."""
        return len(self._filter(GroupQuery(ask, query.first_step, query.last_step)))

    def list_values(self, column: Literal["environment", "reason"]) -> list[str]:
        """Return the values of a column over all groups, in alphabetical order."""
        values = self.frame["reasons"].explode() if column == "reason" else self.frame[column]
        return sorted(value for value in values.unique().to_list() if value)

    def _filter(self, query: GroupQuery) -> pl.DataFrame:
        """Return the groups that a query asks for, as a frame."""
        import polars as pl

        frame = self.frame
        conditions = {
            "wrong": pl.col("num_wrong") > 0,
            "all_wrong": (pl.col("num_wrong") > 0) & (pl.col("num_right") == 0),
            "all_right": (pl.col("num_right") > 0) & (pl.col("num_wrong") == 0),
            "silent": pl.col("is_silent"),
            "unscored": pl.col("num_unscored") > 0,
            "repeated": pl.col("item_key").is_duplicated(),
        }
        if query.ask:
            frame = frame.filter(conditions[query.ask])
        if query.first_step is not None:
            frame = frame.filter(pl.col("step") >= query.first_step)
        if query.last_step is not None:
            frame = frame.filter(pl.col("step") <= query.last_step)
        if query.environment:
            frame = frame.filter(pl.col("environment") == query.environment)
        if query.item:
            frame = frame.filter(pl.col("item_key") == query.item)
        if query.reason:
            frame = frame.filter(pl.col("reasons").list.contains(query.reason))
        return frame


def _order_groups(frame: pl.DataFrame, order: GroupOrder) -> pl.DataFrame:
    if order == "worst":
        return frame.sort(["mean", "step", "group"], descending=[False, True, False])
    is_newest_first = order == "newest"
    return frame.sort(["step", "group"], descending=[is_newest_first, False])


def read_group_table(folder: Path, text: str = "") -> GroupTable:
    """Return a line per group of the rollouts in a folder.

    Args:
        folder: The folder `rollouts/` of a run; one that does not exist holds no groups.
        text: Only groups with this text in the prompt or in an answer, without regard to case.

    Raises:
        StorageError: A file is damaged.
    """
    import polars as pl

    files = list_rollout_files(folder)
    try:
        return GroupTable(_scan(files, text).collect(engine="streaming"))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise StorageError(f"{folder} cannot be read: {error}") from error


def _scan(files: Sequence[RolloutFile], text: str) -> pl.LazyFrame:
    """Return a lazy frame of groups with the counts that questions are about."""
    import polars as pl

    if files:
        rollouts = scan_rollouts(files)
    else:
        rollouts = pl.LazyFrame(schema=_make_empty_schema())
    has_text = pl.lit(True)
    if text:
        wanted = text.lower()
        # Literal: what a person types is no regular expression.
        has_text = pl.any_horizontal(
            pl.col(name).str.to_lowercase().str.contains(wanted, literal=True)
            for name in ("prompt", "answer")
        )
    score, outcome = pl.col("score"), pl.col("outcome")
    is_unscored = outcome.is_in(UNSCORED_OUTCOMES) | score.is_null()
    return (
        rollouts.group_by("step", "group")
        .agg(
            pl.col("environment", "item_key", "prompt").first(),
            score.drop_nulls().sort().alias("scores"),
            pl.len().alias("num_rollouts"),
            score.mean().alias("mean"),
            (score > 0).sum().alias("num_right"),
            (score <= 0).sum().alias("num_wrong"),
            is_unscored.sum().alias("num_unscored"),
            (outcome == "no signal").all().alias("is_silent"),
            pl.col("reason").drop_nulls().unique().alias("reasons"),
            has_text.any().alias("has_text"),
        )
        .filter(pl.col("has_text"))
    )


def _make_empty_schema() -> dict[str, pl.DataType]:
    """Return the column types of a run without rollouts."""
    import polars as pl

    types: dict[str, pl.DataType] = {
        "step": pl.Int32(),
        "group": pl.Int32(),
        "rollout": pl.Int32(),
        "score": pl.Float64(),
    }
    return {name: types.get(name, pl.String()) for name in COLUMNS}


def read_group(folder: Path, step: int, group: int) -> list[Json]:
    """Return the rollouts of one group with their tokens, in order; none if it is not kept.

    Raises:
        StorageError: A file is damaged.
    """
    import polars as pl

    files = [
        file for file in list_rollout_files(folder) if file.first_step <= step <= file.last_step
    ]
    if not files:
        return []
    wanted = (pl.col("step") == step) & (pl.col("group") == group)
    try:
        return scan_rollouts(files).filter(wanted).collect().sort("rollout").to_dicts()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise StorageError(f"{folder} cannot be read: {error}") from error
