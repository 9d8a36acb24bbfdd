"""Say which run may be meant by an id that does not exist."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from lachesis.base.errors import shorten
from lachesis.reporting.run_cache import RunCache
from lachesis.runs.record import RunRecord


@dataclass(frozen=True)
class MissingRun:
    """Hold what the page about an unknown run shows."""

    run_id: str
    nearest: RunRecord | None
    num_runs: int


def build_missing_run(cache: RunCache, run_id: str) -> MissingRun:
    """Return the run whose id or name is nearest to what was asked for, and how many there are."""
    records = cache.list_records()
    # A person may have typed the id or the name.
    names = {record.run_id: record for record in records}
    names |= {record.name: record for record in records if record.name}
    matches = difflib.get_close_matches(run_id, list(names), n=1, cutoff=0.5)
    nearest = names[matches[0]] if matches else None
    return MissingRun(shorten(run_id, 40), nearest, len(records))
