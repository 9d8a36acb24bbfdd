"""Read and compare points in time, stored as ISO 8601 texts with a time zone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator


def _require_time_zone(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


IsoTime = Annotated[str, AfterValidator(_require_time_zone)]


def now_iso() -> str:
    """Fine enough that what was made one after the other is in that order when it is sorted by its
    time.
    """
    return datetime.now(UTC).isoformat(timespec="microseconds")


def iso_to_unix_s(moment: str) -> float:
    """Return an ISO time as seconds since 1970."""
    return datetime.fromisoformat(moment).timestamp()


def seconds_between(start: str, end: str | None = None) -> float:
    """Seconds from one ISO time to another, or until now."""
    end_time = datetime.fromisoformat(end) if end else datetime.now(UTC)
    return (end_time - datetime.fromisoformat(start)).total_seconds()
