"""Write tables and links of Markdown, with what would break them made harmless."""

import re
from collections.abc import Iterable, Sequence


def make_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; line feeds and bars in its cells are replaced."""
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += ["| " + " | ".join(map(_clean_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _clean_cell(value: object) -> str:
    text = re.sub(r"\s+", " ", str(value)).strip()
    return text.replace("|", r"\|")


def take_first_sentence(docstring: str | None) -> str:
    """Return the first sentence of a docstring in one line."""
    text = re.sub(r"\s+", " ", docstring or "").strip()
    match = re.match(r"(.+?[.:])(?= [A-Z`]|$)", text)
    return match[1] if match else text
