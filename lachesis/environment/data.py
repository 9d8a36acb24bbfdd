"""Items: read them, keep some aside that are never trained on, and give the others in an order that a resumed run repeats."""

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
SHOWN = 3
"""Broken rows that are named in full."""


class DatasetError(Exception):
    """There is nothing to train on. The text says where it was looked for."""


def rows(source: str | Path, *, needed: Sequence[str], split: str = "train", subset: str | None = None) -> list[Item]:
    """The rows of a JSONL file, or of the split of a data set of Hugging Face, in their order. A row that is no object, or
    lacks one of the `needed` fields or has nothing in it, is left out; how many, and why, goes to the log.

    Raises DatasetError when the source is not there, or no row is left.
    """
    file = Path(source).expanduser()
    local = file.suffix in (".jsonl", ".json", ".ndjson")
    found: Iterable[Any] = _lines(file) if local else _hub(str(source), subset, split)
    kept: list[Item] = []
    broken: Counter[str] = Counter()
    for number, row in enumerate(found, 1):
        problem = _problem(row, needed)
        if problem is None:
            kept.append(row)
        else:
            broken[problem] += 1
            if broken.total() <= SHOWN:
                log.warning("%s, row %d is left out: %s", source, number, problem)
    if broken:
        told = ", ".join(f"{count} {problem}" for problem, count in broken.most_common(5))
        log.warning("%s: %d of %d rows are left out: %s", source, broken.total(), broken.total() + len(kept), told)
    if not kept:
        why = ", ".join(broken) or "it is empty"
        raise DatasetError(f"{source} holds no row that can be used ({why}); needed in each: {', '.join(needed)}")
    return kept


def _lines(file: Path) -> Iterable[Any]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        where = "" if file.is_absolute() else f"; the environment runs in {Path.cwd()}, so give the whole path"
        raise DatasetError(f"{file} cannot be read: {error.strerror or error}{where}") from error
    for line in text.split("\n"):  # and at nothing else, as U+2028 may stand in a text
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield None


def _hub(name: str, subset: str | None, split: str) -> Iterable[Any]:
    import datasets

    try:
        found: Iterable[Any] = datasets.load_dataset(name, subset, split=split)
        return found
    except Exception as error:  # its own kinds, and those of the network
        where = f"{name}{f' ({subset})' if subset else ''}, split {split}"
        raise DatasetError(
            f"the data set {where} cannot be loaded: {type(error).__name__}: {str(error)[:300]}; a local JSONL file can stand "
            "in its place"
        ) from error


def _problem(row: Any, needed: Sequence[str]) -> str | None:
    if not isinstance(row, dict):
        return "is no JSON object"
    for name in needed:
        value = row.get(name)
        if value is None or (isinstance(value, str) and not value.strip()):
            return f"has no {name!r}"
    return None


@dataclass
class Split:
    """Items that are trained on, and items that never are."""

    train: list[Item]
    held_out: list[Item]
    repeated: int = 0
    """Items that were taken out of the training ones because a held-out one asks the same."""
    _orders: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def item(self, position: int, seed: int) -> Item:
        """The training item at this place of an endless sequence: each pass holds every item once, in an order of its own."""
        turn, place = divmod(position, len(self.train))
        if (seed, turn) not in self._orders:
            order = list(range(len(self.train)))
            random.Random(f"{seed}/{turn}").shuffle(order)
            self._orders = {(seed, turn): order}
        return self.train[self._orders[seed, turn][place]]


def split(items: Iterable[Item], question: Callable[[Item], str], *, share: float, most: int) -> Split:
    """Keep about `share` of the items aside, and evaluate on at most `most` of those. The side depends on what an item asks and
    on nothing else: one that occurs twice is on one side only, and neither the order of the rows nor new ones move the others.

    Raises DatasetError when there are not two different items.
    """
    placed = sorted(((_place(question(item)), item) for item in items), key=lambda one: one[0])
    distinct = sorted({place for place, _ in placed})
    if len(distinct) < 2:
        raise DatasetError(f"the data set holds {len(distinct)} different items; needed: one to train on and one to hold out")
    held = {place for place in distinct[:-1] if int(place, 16) < share * 2**256} or {distinct[0]}
    aside = list({place: item for place, item in placed if place in held}.values())
    return Split([item for place, item in placed if place not in held], aside[:most])


def given(train: Iterable[Item], held_out: Iterable[Item], question: Callable[[Item], str], *, most: int) -> Split:
    """Two sides as the data set has them. What a held-out item asks is not trained on. Raises as `split` does."""
    aside = sorted(((_place(question(item)), item) for item in held_out), key=lambda one: one[0])
    trained = [(_place(question(item)), item) for item in train]
    both = {place for place, _ in aside}
    kept = [item for place, item in trained if place not in both]
    if not kept or not aside:
        raise DatasetError(f"the data set holds {len(kept)} items to train on and {len(aside)} to hold out; each needs one")
    if len(kept) < len(trained):
        log.warning("%d training items are left out: a held-out item asks the same", len(trained) - len(kept))
    once = list(dict(aside).values())
    return Split(kept, once[:most], repeated=len(trained) - len(kept))


def _place(question: str) -> str:
    return hashlib.sha256(" ".join(question.split()).encode("utf-8", "replace")).hexdigest()
