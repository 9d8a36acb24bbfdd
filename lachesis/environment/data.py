"""Items: read them, keep some aside that are never trained on, and give the others in an order that
a resumed run repeats.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
Item = dict[str, Any]
MAX_LOGGED_ROWS = 3
"""Broken rows that are named in full."""


class DatasetError(Exception):
    """There is nothing to train on. The text says where it was looked for."""


def rows(
    source: str | Path, *, needed: Sequence[str], split: str = "train", subset: str | None = None
) -> list[Item]:
    """The rows of a JSONL file, or of the split of a data set of Hugging Face, in their order. A
    row that is no object, or lacks one of the `needed` fields or has nothing in it, is left out;
    how many, and why, goes to the log.

    Raises DatasetError when the source is not there, or no row is left.
    """
    file = Path(source).expanduser()
    is_local = file.suffix in (".jsonl", ".json", ".ndjson")
    source_rows: Iterable[Any] = (
        _read_json_rows(file) if is_local else _load_from_hub(str(source), subset, split)
    )
    usable_rows: list[Item] = []
    problem_counts: Counter[str] = Counter()
    for number, row in enumerate(source_rows, 1):
        problem = _find_problem(row, needed)
        if problem is None:
            usable_rows.append(row)
        else:
            problem_counts[problem] += 1
            if problem_counts.total() <= MAX_LOGGED_ROWS:
                log.warning("%s, row %d is left out: %s", source, number, problem)
    if problem_counts:
        summary = ", ".join(
            f"{count} {problem}" for problem, count in problem_counts.most_common(5)
        )
        log.warning(
            "%s: %d of %d rows are left out: %s",
            source,
            problem_counts.total(),
            problem_counts.total() + len(usable_rows),
            summary,
        )
    if not usable_rows:
        reason = ", ".join(problem_counts) or "it is empty"
        raise DatasetError(
            f"{source} holds no row that can be used ({reason}); needed in each: {', '.join(needed)}"
        )
    return usable_rows


def _read_json_rows(file: Path) -> Iterable[Any]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        hint = (
            ""
            if file.is_absolute()
            else f"; the environment runs in {Path.cwd()}, so give the whole path"
        )
        raise DatasetError(f"{file} cannot be read: {error.strerror or error}{hint}") from error
    for line in text.split("\n"):  # and at nothing else, as U+2028 may stand in a text
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield None


def _load_from_hub(name: str, subset: str | None, split: str) -> Iterable[Any]:
    import datasets

    try:
        dataset: Iterable[Any] = datasets.load_dataset(name, subset, split=split)
        return dataset
    except Exception as error:  # its own kinds, and those of the network
        source = f"{name}{f' ({subset})' if subset else ''}, split {split}"
        raise DatasetError(
            f"the data set {source} cannot be loaded: {type(error).__name__}: {str(error)[:300]}; a local JSONL file can stand "
            "in its place"
        ) from error


def _find_problem(row: Any, needed: Sequence[str]) -> str | None:
    if not isinstance(row, dict):
        return "is no JSON object"
    for name in needed:
        value = row.get(name)
        if value is None or (isinstance(value, str) and not value.strip()):
            return f"has no {name!r}"
    return None


@dataclass
class DatasetSplit:
    """Items that are trained on, and items that never are."""

    train: list[Item]
    held_out: list[Item]
    num_overlapping: int = 0
    """Items that were taken out of the training ones because a held-out one asks the same."""
    _orders: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def get_training_item(self, position: int, seed: int) -> Item:
        """The training item at this place of an endless sequence: each pass holds every item once,
        in an order of its own.
        """
        epoch, index = divmod(position, len(self.train))
        if (seed, epoch) not in self._orders:
            order = list(range(len(self.train)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            self._orders = {(seed, epoch): order}
        return self.train[self._orders[seed, epoch][index]]


def split_items(
    items: Iterable[Item],
    get_question: Callable[[Item], str],
    *,
    held_out_share: float,
    max_held_out: int,
) -> DatasetSplit:
    """Keep about `share` of the items aside, and evaluate on at most `most` of those. The side
    depends on what an item asks and on nothing else: one that occurs twice is on one side only, and
    neither the order of the rows nor new ones move the others.

    Raises DatasetError when there are not two different items.
    """
    hashed_items = sorted(
        ((_hash_question(get_question(item)), item) for item in items), key=lambda pair: pair[0]
    )
    distinct_hashes = sorted({question_hash for question_hash, _ in hashed_items})
    if len(distinct_hashes) < 2:
        raise DatasetError(
            f"the data set holds {len(distinct_hashes)} different items; needed: one to train on and one to hold out"
        )
    held_out_hashes = {
        question_hash
        for question_hash in distinct_hashes[:-1]
        if int(question_hash, 16) < held_out_share * 2**256
    } or {distinct_hashes[0]}
    held_out = list(
        {
            question_hash: item
            for question_hash, item in hashed_items
            if question_hash in held_out_hashes
        }.values()
    )
    return DatasetSplit(
        [item for question_hash, item in hashed_items if question_hash not in held_out_hashes],
        held_out[:max_held_out],
    )


def build_given_split(
    train: Iterable[Item],
    held_out: Iterable[Item],
    get_question: Callable[[Item], str],
    *,
    max_held_out: int,
) -> DatasetSplit:
    """Two sides as the data set has them. What a held-out item asks is not trained on. Raises as
    `split` does.
    """
    hashed_held_out = sorted(
        ((_hash_question(get_question(item)), item) for item in held_out), key=lambda pair: pair[0]
    )
    hashed_train = [(_hash_question(get_question(item)), item) for item in train]
    held_out_hashes = {question_hash for question_hash, _ in hashed_held_out}
    train_items = [
        item for question_hash, item in hashed_train if question_hash not in held_out_hashes
    ]
    if not train_items or not hashed_held_out:
        raise DatasetError(
            f"the data set holds {len(train_items)} items to train on and {len(hashed_held_out)} to hold out; each needs one"
        )
    if len(train_items) < len(hashed_train):
        log.warning(
            "%d training items are left out: a held-out item asks the same",
            len(hashed_train) - len(train_items),
        )
    unique_held_out = list(dict(hashed_held_out).values())
    return DatasetSplit(
        train_items,
        unique_held_out[:max_held_out],
        num_overlapping=len(hashed_train) - len(train_items),
    )


def _hash_question(question: str) -> str:
    return hashlib.sha256(" ".join(question.split()).encode("utf-8", "replace")).hexdigest()
