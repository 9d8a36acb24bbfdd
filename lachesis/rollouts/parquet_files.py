"""Keep the rollouts of a run in Parquet files, and say what their columns hold.

The folder `rollouts/` of a run has one file per some steps, named after the first and the last of
them: `steps-00000001-00000012.parquet`. Small files are merged to larger ones while training goes
on, and the oldest are deleted when all of them take more space than the run may use; `deleted.json`
counts the rollouts in those. Any program that reads Parquet can read the files.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lachesis.base.arrays import Array
from lachesis.base.files import storage_errors, write_private
from lachesis.base.json_text import Json

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

log = logging.getLogger(__name__)
# What became of a rollout.
RolloutOutcome = Literal[
    "trained", "no signal", "invalid", "truncated", "too long", "dropped", "refused"
]
FILE_NAME = re.compile(r"steps-(\d{8})-(\d{8})\.parquet")
# So many small files are merged to one.
MERGED_FILES = 16
COLUMNS: dict[str, str] = {
    "step": "the training step whose batch it was in, from 1",
    "group": "the number of its group in the batch, from 0; the rollouts of a group have one item",
    "rollout": "its number in the group, from 0",
    "environment": "the name of the environment",
    "item_key": "a short hash of the item: the same item has the same key in each step and run",
    "item": "the item as the environment has it, as JSON, cut after some thousand characters",
    "prompt": "the text before the first sampled token",
    "answer": "the text from the first sampled token on, later turns included",
    "score": "the environment's score; null where it could not score the answer",
    "parts": "the parts of the score by name",
    "advantage": "the advantage in its group, before weights and penalties; null without one",
    "outcome": "trained, or why it was not: no signal (all scores of the group are equal), invalid "
    "(the environment could not score it), truncated, too long, dropped (the group could not be "
    "trained on) or refused (the group did not have the form of one)",
    "reason": "why it scored 0, is invalid, was dropped or was refused, if that is known",
    "tokens": "the token ids, prompt and answer",
    "sampled": "for each token whether the model sampled it",
    "logprobs": "for each token the natural logarithm of its probability when it was sampled; null "
    "where there is none",
    "trained_logprobs": "for each token that was trained on the natural logarithm of its "
    "probability under the weights in training; null elsewhere",
    "weights_version": "how often the weights had been updated when it was sampled; null if that "
    "is not known",
}
"""The columns of a file and what they hold."""


def make_schema() -> pa.Schema:
    """Return the types of the columns."""
    import pyarrow as pa

    types = {
        "step": pa.int32(),
        "group": pa.int32(),
        "rollout": pa.int32(),
        "score": pa.float64(),
        "advantage": pa.float64(),
        "weights_version": pa.int32(),
        "parts": pa.map_(pa.string(), pa.float64()),
        "tokens": pa.list_(pa.int32()),
        "sampled": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "trained_logprobs": pa.list_(pa.float32()),
    }
    return pa.schema([(name, types.get(name, pa.string())) for name in COLUMNS])


@dataclass(frozen=True)
class FlatLists:
    """Hold a list per rollout as one array of all their values."""

    values: Array
    offsets: Array
    """Where each list begins, and the end of the last one."""
    is_present: Array
    """Whether a rollout has a list at all."""


NO_LISTS: Mapping[str, FlatLists] = MappingProxyType({})


def make_table(rows: Sequence[Json], flat_lists: Mapping[str, FlatLists] = NO_LISTS) -> pa.Table:
    """Return rollouts as a table with the columns of `make_schema`.

    Args:
        rows: The values of each rollout by column.
        flat_lists: Columns of lists that the rows do not have. NaN among floats means null.
    """
    import pyarrow as pa

    schema, columns = make_schema(), []
    for field in schema:
        if field.name in flat_lists:
            columns.append(_make_list_column(flat_lists[field.name], field.type))
        else:
            columns.append(pa.array(_get_values(rows, field.name), field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _get_values(rows: Sequence[Json], name: str) -> list[Any]:
    """Return a column's value of each row, None where a row has none."""
    try:
        return list(map(itemgetter(name), rows))
    except KeyError:
        return [row.get(name) for row in rows]


def _make_list_column(lists: FlatLists, list_type: pa.ListType) -> pa.ListArray:
    """Return lists as a column of Parquet; a value that is NaN is null."""
    import pyarrow as pa

    is_null = np.isnan(lists.values) if lists.values.dtype.kind == "f" else None
    return pa.ListArray.from_arrays(
        pa.array(lists.offsets, pa.int32()),
        pa.array(lists.values, list_type.value_type, mask=is_null),
        type=list_type,
        mask=pa.array(~lists.is_present),
    )


@dataclass(frozen=True, order=True)
class RolloutFile:
    """Name one file by the first and the last step in it."""

    first_step: int
    last_step: int
    path: Path


class RolloutFolder:
    """Write and delete the files of one run; one process at a time does so."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self.max_bytes = path, max_bytes

    def list_files(self) -> list[RolloutFile]:
        """Return the files by their first step."""
        return list_rollout_files(self.path)

    def append(self, rows: Sequence[Json], flat_lists: Mapping[str, FlatLists] = NO_LISTS) -> None:
        """Write rollouts of consecutive steps to a new file, then merge small files and delete old
        ones.

        The arguments are those of `make_table`.

        Raises:
            StorageError: The file cannot be written.
        """
        if rows:
            self._write(make_table(rows, flat_lists))
            self._merge_small_files()
            self._delete_oldest_files()

    def discard_after(self, step: int) -> None:
        """Delete the rollouts of later steps, which a run that resumes at `step` makes again."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        files = self.list_files()
        for leftover in {*self.path.glob("*.parquet*")} - {file.path for file in files}:
            leftover.unlink()  # A merge was interrupted.
        for file in files:
            if file.last_step <= step:
                continue
            if file.first_step <= step:
                table = pq.read_table(file.path)
                self._write(table.filter(pc.less_equal(table["step"], step)))
            file.path.unlink()

    def _write(self, table: pa.Table) -> None:
        """Write a table under the name of its steps; a file with this name appears complete."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        steps = pc.min_max(table["step"]).as_py()
        name = f"steps-{steps['min']:08d}-{steps['max']:08d}.parquet"
        temporary = self.path / f".{name}.part"
        with storage_errors(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            pq.write_table(table, temporary, compression="zstd")
            os.replace(temporary, self.path / name)

    def _merge_small_files(self) -> None:
        """Replace the newest files by one when there are many that hold few steps each."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        max_file_bytes = self.max_bytes / MERGED_FILES
        newest = self.list_files()[-MERGED_FILES:]
        sizes = [file.path.stat().st_size for file in newest]
        if len(newest) < MERGED_FILES or max(sizes) > max_file_bytes / MERGED_FILES:
            return
        tables = [pq.read_table(file.path) for file in newest]
        self._write(pa.concat_tables(tables))
        for file in newest:
            file.path.unlink()

    def _delete_oldest_files(self) -> None:
        """Delete the oldest files while all of them take too much space; the newest stays."""
        import pyarrow.parquet as pq

        files = self.list_files()
        sizes = [file.path.stat().st_size for file in files]
        total_bytes, num_deleted = sum(sizes), 0
        for file, size in zip(files[:-1], sizes, strict=False):
            if total_bytes <= self.max_bytes:
                break
            num_deleted += pq.read_metadata(file.path).num_rows
            file.path.unlink()
            total_bytes -= size
        if num_deleted:
            num_deleted += count_deleted_rollouts(self.path)
            write_private(self.path / "deleted.json", json.dumps({"rollouts": num_deleted}))


def list_rollout_files(folder: Path) -> list[RolloutFile]:
    """Return the files in a folder by their first step.

    While small files are merged there is a moment in which their rollouts are there twice; the
    small ones are left out then.
    """
    files = sorted(
        RolloutFile(int(match[1]), int(match[2]), path)
        for path in folder.glob("steps-*.parquet")
        if (match := FILE_NAME.fullmatch(path.name))
    )
    return [
        file
        for file in files
        if not any(
            other is not file
            and other.first_step <= file.first_step
            and file.last_step <= other.last_step
            for other in files
        )
    ]


def scan_rollouts(files: Sequence[RolloutFile]) -> pl.LazyFrame:
    """Return the rollouts in some files; a column that only some of them have is null elsewhere."""
    import polars as pl

    return pl.concat([pl.scan_parquet(file.path) for file in files], how="diagonal")


def count_deleted_rollouts(folder: Path) -> int:
    """Return how many rollouts were deleted because the run may not use more space."""
    try:
        return int(json.loads((folder / "deleted.json").read_text())["rollouts"])
    except (OSError, ValueError, KeyError, TypeError):  # None were, or the file is damaged.
        return 0
