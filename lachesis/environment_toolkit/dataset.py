"""Read items, hold some of them out, and give the others in an order that a resumed run repeats."""

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
# Number of unusable rows that are logged one by one.
MAX_LOGGED_ROWS = 3


class DatasetError(Exception):
    """There is nothing to train on; the message says where data was looked for."""


def rows(
    source: str | Path, *, needed: Sequence[str], split: str = "train", subset: str | None = None
) -> list[Item]:
    """Return the rows of a JSONL file, or of one split of a data set of Hugging Face, in order.

    Rows that are not objects, or lack one of the `needed` fields or have it empty, are left out;
    the log says how many and why.

    Raises:
        DatasetError: The source does not exist, or no usable row is left.
    """
    file = Path(source).expanduser()
    source_rows: Iterable[Any]
    if file.suffix in (".jsonl", ".json", ".ndjson"):
        source_rows = _read_json_rows(file)
    else:
        source_rows = _load_from_hub(str(source), subset, split)
    usable_rows: list[Item] = []
    problem_counts: Counter[str] = Counter()
    for number, row in enumerate(source_rows, 1):
        problem = _find_problem(row, needed)
        if problem is None:
            usable_rows.append(row)
            continue
        problem_counts[problem] += 1
        if problem_counts.total() <= MAX_LOGGED_ROWS:
            log.warning("%s, row %d is left out: %s", source, number, problem)
    if problem_counts:
        _log_omitted_rows(source, problem_counts, num_usable=len(usable_rows))
    if not usable_rows:
        reason = ", ".join(problem_counts) or "it is empty"
        raise DatasetError(
            f"{source} has no usable row ({reason}); each row needs {', '.join(needed)}"
        )
    return usable_rows


def _log_omitted_rows(source: str | Path, problem_counts: Counter[str], *, num_usable: int) -> None:
    num_omitted = problem_counts.total()
    summary = ", ".join(f"{count} {problem}" for problem, count in problem_counts.most_common(5))
    log.warning(
        "%s: %d of %d rows are left out: %s", source, num_omitted, num_omitted + num_usable, summary
    )


def _read_json_rows(file: Path) -> Iterable[Any]:
    """Yield the rows of a JSONL file; None for a line that is not JSON."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if file.is_absolute():
            hint = ""
        else:
            hint = f"; the environment runs in {Path.cwd()}, so use an absolute path"
        raise DatasetError(f"{file} cannot be read: {error.strerror or error}{hint}") from error
    for line in text.split("\n"):  # Not splitlines(): a text may contain U+2028.
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield None


def _load_from_hub(name: str, subset: str | None, split: str) -> Iterable[Any]:
    """Return the rows of a data set of the Hub; raise DatasetError if it cannot be had."""
    import datasets

    try:
        dataset: Iterable[Any] = datasets.load_dataset(name, subset, split=split)
        return dataset
    except Exception as error:  # The library raises its own errors and those of the network.
        source = f"{name}{f' ({subset})' if subset else ''}, split {split}"
        raise DatasetError(
            f"the data set {source} cannot be loaded: {type(error).__name__}: "
            f"{str(error)[:300]}; a local JSONL file can be used instead"
        ) from error


def _find_problem(row: object, needed: Sequence[str]) -> str | None:
    if not isinstance(row, dict):
        return "is not a JSON object"
    for name in needed:
        value = row.get(name)
        if value is None or (isinstance(value, str) and not value.strip()):
            return f"has no {name!r}"
    return None


@dataclass
class DatasetSplit:
    """Hold items to train on, and items that are never trained on."""

    train: list[Item]
    held_out: list[Item]
    num_overlapping: int = 0
    """Number of training items left out because a held-out item asks the same question."""
    _orders: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def get_training_item(self, position: int, seed: int) -> Item:
        """Return the item at a position of an endless sequence.

        Each pass over the items contains every item once, in an order of its own.
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
    """Hold out about `held_out_share` of the items, and evaluate on at most `max_held_out` of
    those.

    Whether an item is held out depends on its question only: equal items are on the same side, and
    neither new rows nor another order move an item to the other side.

    Raises:
        DatasetError: There are fewer than two different items.
    """
    hashed_items = sorted(
        ((_hash_question(get_question(item)), item) for item in items), key=lambda pair: pair[0]
    )
    distinct_hashes = sorted({question_hash for question_hash, _ in hashed_items})
    if len(distinct_hashes) < 2:
        raise DatasetError(
            f"the data set has {len(distinct_hashes)} different items; needed: at least one to "
            "train on and one to hold out"
        )
    # A hash is a number that is evenly distributed below 2**256. One item is always held out, and
    # one never.
    limit = held_out_share * 2**256
    held_out_hashes = {
        item_hash for item_hash in distinct_hashes[:-1] if int(item_hash, 16) < limit
    }
    held_out_hashes = held_out_hashes or {distinct_hashes[0]}
    train = [item for item_hash, item in hashed_items if item_hash not in held_out_hashes]
    # An item that occurs twice is evaluated once.
    held_out = {item_hash: item for item_hash, item in hashed_items if item_hash in held_out_hashes}
    return DatasetSplit(train, list(held_out.values())[:max_held_out])


def build_given_split(
    train: Iterable[Item],
    held_out: Iterable[Item],
    get_question: Callable[[Item], str],
    *,
    max_held_out: int,
) -> DatasetSplit:
    """Use the split of a data set, leaving out training items whose question is held out.

    Raises:
        DatasetError: One side is empty.
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
            f"the data set has {len(train_items)} items to train on and {len(hashed_held_out)} to "
            "hold out; each side needs at least one"
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
