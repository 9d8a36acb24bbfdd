"""Filter and order the runs of a list.

An address such as `/runs?env=arithmetic&q=learning_rate>0.001&sort=-held` holds the whole state of
the page.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lachesis.reporting.run_summary import RunSummary
from lachesis.reporting.verdict_marks import choose_mark, needs_a_look
from lachesis.runs.record import RunRecord

ROWS_PER_PAGE = 50
# The letters of runs that are compared, in the order in which they were chosen.
LETTERS = "ABCDEFGH"
MAX_COMPARED_RUNS = len(LETTERS)
_COMPARISON = re.compile(r"([\w./]+)(>=|<=|!=|=|>|<)(.+)")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
    "=": operator.eq, "!=": operator.ne,
}  # fmt: skip
Summarize = Callable[[RunRecord], RunSummary]


def read_count(text: str) -> int | None:
    """Return the whole number of a query; None for another text, or one of nine digits and more."""
    return int(text) if text.isdecimal() and len(text) < 9 else None


@dataclass(frozen=True)
class RunFilter:
    """Say which runs are listed, in which order, and how."""

    text: str = ""
    """Words that a run's texts contain, and comparisons of its settings such as `group_size>8`."""
    environment: str = ""
    health: str = ""
    """A verdict, or `look` for all runs that need a look."""
    state: str = ""
    """A status, or `alive` or `ended`."""
    tag: str = ""
    sort: str = "-run"
    """What the runs are ordered by; with a minus sign the largest value comes first."""
    columns: str = ""
    """`all` shows every setting, and not only those that differ."""
    page: int = 1
    ticked: tuple[str, ...] = ()
    """The runs that are chosen for a comparison, in this order."""

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> "RunFilter":
        """Return the filter of an address; unknown parameters are ignored."""
        page = query.get("page", "1")
        ticked = [run_id for run_id in query.get("ticked", "").split(",") if run_id]
        return cls(
            text=query.get("q", "").strip(),
            environment=query.get("env", ""),
            health=query.get("health", ""),
            state=query.get("state", ""),
            tag=query.get("tag", ""),
            sort=query.get("sort", "") or "-run",
            columns=query.get("columns", ""),
            page=read_count(page) or 1,
            ticked=tuple(dict.fromkeys(ticked))[:MAX_COMPARED_RUNS],
        )

    def list_set_filters(self) -> dict[str, str]:
        """Return the filters that leave runs out, by their name in the address."""
        values = {
            "q": self.text,
            "env": self.environment,
            "health": self.health,
            "state": self.state,
            "tag": self.tag,
        }
        return {name: value for name, value in values.items() if value}


def select_runs(
    records: Sequence[RunRecord], wanted: RunFilter, summarize: Summarize
) -> list[RunRecord]:
    """Return the runs that a filter lets through, in its order.

    Args:
        records: All runs, the newest first.
        wanted: The filter.
        summarize: Returns the summary of a run. Only comparisons of settings and an order by
            results need it, because it reads files of the run.
    """
    words, comparisons = _split_text(wanted.text)
    matching = [
        record
        for record in records
        if _matches_fields(record, wanted) and _contains_words(record, words)
    ]
    for name, symbol, value in comparisons:
        matching = [
            record
            for record in matching
            if _compare(_find_setting(summarize(record), name), symbol, value)
        ]
    return _sort_runs(matching, wanted.sort, summarize)


def _matches_fields(record: RunRecord, wanted: RunFilter) -> bool:
    """Return whether environment, tag, verdict and state of a run are those that are wanted."""
    environments = (record.environment, *record.additional_environments)
    if wanted.environment and wanted.environment not in environments:
        return False
    if wanted.tag and wanted.tag not in record.tags:
        return False
    if wanted.health == "look":
        if not needs_a_look(record):
            return False
    elif wanted.health and choose_mark(record).word != wanted.health:
        return False
    if wanted.state in ("alive", "ended"):
        return record.has_ended == (wanted.state == "ended")
    return wanted.state in ("", record.status)


def _split_text(text: str) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Return the words of a search, and its comparisons as name, operator and value."""
    words, comparisons = [], []
    for part in text.split():
        if match := _COMPARISON.fullmatch(part):
            comparisons.append((match[1], match[2], match[3]))
        else:
            words.append(part.casefold())
    return words, comparisons


def _contains_words(record: RunRecord, words: Sequence[str]) -> bool:
    """Return whether the texts of a run contain all words."""
    if not words:
        return True
    texts = (
        record.run_id,
        record.name,
        record.environment,
        *record.additional_environments,
        *record.tags,
        record.note,
        record.base_model,
        record.status,
        record.learning,
        record.schedule,
    )
    text = " ".join(part for part in texts if part).casefold()
    return all(word in text for word in words)


def _find_setting(summary: RunSummary, name: str) -> Any:
    """Return a setting by its name, with or without its section; None if there is none."""
    if name in summary.settings:
        return summary.settings[name]
    for key, value in summary.settings.items():
        if key.rpartition(".")[2] == name:
            return value
    return None


def _compare(setting: Any, symbol: str, text: str) -> bool:
    """Return whether a setting compares with a string in the given way; numbers compare as
    numbers."""
    if setting is None:
        return symbol in ("=", "!=") and (text.casefold() == "none") == (symbol == "=")
    if isinstance(setting, int | float) and not isinstance(setting, bool):
        try:
            return _OPERATORS[symbol](setting, float(text.replace(",", "")))
        except ValueError:
            return symbol == "!="
    return _OPERATORS[symbol](str(setting).casefold(), text.casefold())


def _get_sort_value(record: RunRecord, key: str, summarize: Summarize) -> Any:
    """Return the value of a run that a list is ordered by, or None."""
    if key == "run":
        return record.created_at
    if key == "health":
        return choose_mark(record).word
    summary = summarize(record)
    if key == "reward":
        return summary.reward.get("last")
    if key == "held":
        return summary.held_out.percent_correct if summary.held_out else None
    if key == "took":
        return summary.duration_s
    if key == "tokens":
        return summary.tokens
    return _find_setting(summary, key)


def _sort_runs(records: list[RunRecord], sort: str, summarize: Summarize) -> list[RunRecord]:
    """Return the runs in order; those without a value come last, and by time the living first."""
    key, is_descending = sort.removeprefix("-"), sort.startswith("-")
    values = {record.run_id: _get_sort_value(record, key, summarize) for record in records}
    known = [record for record in records if values[record.run_id] is not None]
    unknown = [record for record in records if values[record.run_id] is None]
    # A setting may be a number in one environment and a word in another.
    are_numbers = all(isinstance(values[record.run_id], int | float) for record in known)
    known.sort(
        key=lambda record: values[record.run_id] if are_numbers else str(values[record.run_id]),
        reverse=is_descending,
    )
    if sort == "-run":
        known.sort(key=lambda record: record.has_ended)
    return known + unknown
