"""Find rollouts of a run: the worst, the best, the invalid ones, or those of one step or item.

Only the rows that are asked for are read from the Parquet files of
`lachesis.rollouts.parquet_files`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lachesis.base.errors import ConfigError, StorageError
from lachesis.base.json_text import Json
from lachesis.rollouts.parquet_files import (
    COLUMNS,
    RolloutFile,
    count_deleted_rollouts,
    list_rollout_files,
    scan_rollouts,
)

if TYPE_CHECKING:
    import polars as pl

MAX_ROLLOUTS = 1000
# Columns with one value per token, which are returned only when they are asked for.
TOKEN_COLUMNS = ("tokens", "sampled", "logprobs", "trained_logprobs")
# Rollouts whose score says something about the answer.
SCORED_OUTCOMES = ("trained", "no signal", "truncated", "too long")


@dataclass(frozen=True)
class RolloutQuery:
    """Say which rollouts of a run are looked for."""

    step: int | None = None
    """Only those of this training step; -1 is the last one."""
    order: Literal["worst", "best", "first"] = "first"
    """By score from below or above; `first` is the order in which they were trained on."""
    invalid: bool = False
    """Only those that could not be scored or trained on."""
    item: str | None = None
    """Only those of the item with this key, or whose prompt contains this text."""
    limit: int = 10
    """Maximum number of rollouts."""
    with_tokens: bool = False
    """Whether token ids and log-probabilities are returned too."""


@dataclass(frozen=True)
class FoundRollouts:
    """Hold the result of a query."""

    rollouts: list[Json]
    num_matching: int
    """How many rollouts match; `rollouts` holds the first of them."""
    first_step: int | None
    """The first step whose rollouts are kept; None if there are none."""
    last_step: int | None
    num_deleted: int
    """How many older rollouts were deleted because the run may not use more space."""


def find_rollouts(folder: Path, query: RolloutQuery) -> FoundRollouts:
    """Return the rollouts in a run's folder `rollouts/` that a query asks for.

    Args:
        folder: The folder; one that does not exist holds no rollouts.
        query: What is looked for.

    Raises:
        ConfigError: A value of the query is not allowed.
        StorageError: A file is damaged.
    """
    if not 1 <= query.limit <= MAX_ROLLOUTS:
        raise ConfigError(f"{query.limit} rollouts were asked for; allowed: 1 to {MAX_ROLLOUTS}")
    files = list_rollout_files(folder)
    num_deleted = count_deleted_rollouts(folder)
    if not files:
        return FoundRollouts([], 0, None, None, num_deleted)
    first_step, last_step = files[0].first_step, max(file.last_step for file in files)
    step = last_step if query.step == -1 else query.step
    if step is not None and not first_step <= step <= last_step:
        raise ConfigError(
            f"rollouts of step {step} were asked for; kept are those of steps {first_step} to "
            f"{last_step}"
        )
    chosen = [file for file in files if step is None or file.first_step <= step <= file.last_step]
    rollouts, num_matching = _read_rollouts(folder, chosen, query, step)
    return FoundRollouts(rollouts, num_matching, first_step, last_step, num_deleted)


def describe_found(found: FoundRollouts) -> str:
    """Return how many rollouts are shown, how many match, and which are kept."""
    if found.first_step is None:
        return "no rollouts are kept (yet); a run keeps them from its first step on"
    count = f"{len(found.rollouts)} of {found.num_matching:,} rollouts that match"
    kept = f"kept are those of steps {found.first_step} to {found.last_step}"
    if not found.num_deleted:
        return f"{count}; {kept}"
    return f"{count}; {kept}, {found.num_deleted:,} older ones were deleted (rollouts.max_gb)"


def _read_rollouts(
    folder: Path, files: list[RolloutFile], query: RolloutQuery, step: int | None
) -> tuple[list[Json], int]:
    """Return the first matching rollouts, and how many match."""
    import polars as pl

    hidden = () if query.with_tokens else TOKEN_COLUMNS
    try:
        rollouts = scan_rollouts(files)
        matching = _filter_rollouts(rollouts, query, step)
        counts = matching.select(pl.len()).collect(engine="streaming")
        rows = (
            _order_rollouts(matching, query)
            .select([name for name in COLUMNS if name not in hidden])
            .collect(engine="streaming")
        )
    except (pl.exceptions.PolarsError, OSError) as error:
        raise StorageError(f"{folder} cannot be read: {error}") from error
    return rows.to_dicts(), int(counts.item())


def _filter_rollouts(rollouts: pl.LazyFrame, query: RolloutQuery, step: int | None) -> pl.LazyFrame:
    """Return the rollouts of a query before they are ordered."""
    import polars as pl

    if step is not None:
        rollouts = rollouts.filter(pl.col("step") == step)
    if query.invalid:
        rollouts = rollouts.filter(pl.col("outcome").is_in(["invalid", "dropped", "refused"]))
    elif query.order != "first":
        rollouts = rollouts.filter(pl.col("outcome").is_in(SCORED_OUTCOMES))
    if query.item is not None:
        has_text = pl.col("prompt").str.contains(query.item, literal=True)
        rollouts = rollouts.filter((pl.col("item_key") == query.item) | has_text)
    return rollouts


def _order_rollouts(rollouts: pl.LazyFrame, query: RolloutQuery) -> pl.LazyFrame:
    """Return the first `limit` rollouts; of equal scores the newest come first."""
    place = ["step", "group", "rollout"]
    if query.order == "first":
        return rollouts.bottom_k(query.limit, by=place).sort(place)
    descending = query.order == "best"
    by, reverse = ["score", "step", "group", "rollout"], [not descending, False, True, True]
    return rollouts.top_k(query.limit, by=by, reverse=reverse).sort(
        by, descending=[descending, True, False, False]
    )
