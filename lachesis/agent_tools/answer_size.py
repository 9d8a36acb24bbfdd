"""Keep each answer to an agent below 40 kB, which is what an agent can read in one call.

Of long texts and lists the head and the tail stay; `shortened` names the places. Lists that go on
in another call have a cursor.
"""

from collections.abc import Sequence
from typing import Any

from lachesis.base.formatting import keep_ends
from lachesis.base.json_text import Json, to_compact_json

MAX_ANSWER_BYTES = 40_000
# What a page of a list may take, which leaves room for the rest of its answer.
MAX_PAGE_BYTES = 36_000
MAX_SHORTENED_PLACES = 20
# Characters of a text and items of a list that stay at first, and at least.
FIRST_LIMITS, LEAST_LIMITS = (4000, 200), (60, 4)


def count_bytes(answer: object) -> int:
    """Return the size of an answer as JSON in bytes."""
    return len(to_compact_json(answer).encode())


def shorten_answer(answer: Json) -> Json:
    """Return an answer of at most 40 kB; `shortened` names the parts that were left out."""
    characters, items = FIRST_LIMITS
    shorter = answer
    while count_bytes(shorter) > MAX_ANSWER_BYTES:
        places: list[str] = []
        shorter = _cut(answer, characters, items, "", places)
        shorter["shortened"] = places[:MAX_SHORTENED_PLACES]
        if (characters, items) == LEAST_LIMITS:
            break
        characters = max(LEAST_LIMITS[0], characters // 2)
        items = max(LEAST_LIMITS[1], items // 2)
    return shorter


def _cut(value: Any, characters: int, items: int, place: str, places: list[str]) -> Any:
    """Return a value without the middle of its long texts and lists; note where in `places`."""
    if isinstance(value, str) and len(value) > characters:
        places.append(f"{place}: {characters:,} of {len(value):,} characters")
        return keep_ends(value, characters)
    if isinstance(value, list):
        if len(value) > items:
            places.append(f"{place}: {items:,} of {len(value):,} items")
            value = [*value[: items // 2], *value[-(items // 2) :]]
        return [
            _cut(item, characters, items, f"{place}.{index}", places)
            for index, item in enumerate(value)
        ]
    if isinstance(value, dict):
        return {
            key: _cut(item, characters, items, f"{place}.{key}".lstrip("."), places)
            for key, item in value.items()
        }
    return value


def take_page(entries: Sequence[Any], cursor: int) -> tuple[list[Any], int | None]:
    """Return as many entries from `cursor` on as fit into an answer, and where the next ones begin.

    The second value is None after the last entry. At least one entry is returned if there is one.
    """
    page: list[Any] = []
    size = 0
    for entry in entries[cursor:]:
        size += count_bytes(entry) + 1
        if page and size > MAX_PAGE_BYTES:
            return page, cursor + len(page)
        page.append(entry)
    return page, None
