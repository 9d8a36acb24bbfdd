"""Read and compare points in time, stored as ISO 8601 texts with a time zone."""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator


def _require_time_zone(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; allowed: an ISO 8601 time with its zone")
    return text


IsoTime = Annotated[str, AfterValidator(_require_time_zone)]


def now_iso() -> str:
    """Return the current time as an ISO 8601 text in UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def iso_to_unix_s(moment: str) -> float:
    """Return a stored time in seconds since the epoch."""
    return datetime.fromisoformat(moment).timestamp()


def seconds_between(start: str, end: str | None = None) -> float:
    """Return the seconds from one stored time to another, by default until now."""
    end_time = datetime.fromisoformat(end) if end else datetime.now(UTC)
    return (end_time - datetime.fromisoformat(start)).total_seconds()
