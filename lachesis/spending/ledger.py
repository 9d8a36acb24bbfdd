"""Keep promised and spent money in a single file, which the removal of a run does not change.

`$LACHESIS_HOME/spending.jsonl` has a line when an attempt of a run, or a test, is promised money,
and one when it is known what that has spent. Lines are added under one lock. Runs that cost nothing
have a line too, so that it is known of each run that was removed that there was one.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lachesis.base.errors import LachesisError, StorageError
from lachesis.base.files import hold_file_lock, storage_errors
from lachesis.base.json_text import Json, read_json_lines
from lachesis.base.timestamps import now_iso
from lachesis.config.profiles import PROFILES
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.spending.budgets import read_budget_usage

log = logging.getLogger(__name__)
FILE_NAME = "spending.jsonl"


@dataclass(frozen=True)
class LedgerEntry:
    """Hold promised and spent money of an attempt of a run, or of a test, in US dollars."""

    key: str
    """The key of its submission to Prefect."""
    at: str
    """When it was last changed, in ISO 8601."""
    by_agent: bool
    promised_usd: float | None
    """The most that the run may cost in all of its attempts; None without a limit."""
    earlier_usd: float
    """The cost of the run's earlier attempts."""
    total_usd: float | None = None
    """The cost of the run until the end of this attempt; None before it is known."""

    @property
    def is_open(self) -> bool:
        """Return whether the spent amount is not known yet."""
        return self.total_usd is None

    def compute_cost(self, total_usd: float | None = None) -> float:
        """Return the cost of this attempt in US dollars; before its end, the most that it may cost.

        Args:
            total_usd: What the run has cost, if that is known and not in the ledger.
        """
        known_usd = self.total_usd if total_usd is None else total_usd
        cost_usd = self.promised_usd or 0.0 if known_usd is None else known_usd
        return max(0.0, cost_usd - self.earlier_usd)


class Ledger:
    """Add lines to the ledger of a home, whose lock is held."""

    def __init__(self, home: Path) -> None:
        self.home, self.file = home, home / FILE_NAME

    def promise_run(self, store: RunStore, record: RunRecord, limit_usd: float | None) -> None:
        """Promise the money of a run's attempt, which is about to be made.

        Args:
            store: The runs of this home.
            record: The run at that attempt.
            limit_usd: The run's `limits.max_cost_usd`.

        Raises:
            StorageError: The disk refused the line.
        """
        if not PROFILES[record.profile].is_paid:
            self._append(record.submission_key, by_agent=record.by_agent, total_usd=0.0)
            return
        earlier_usd = compute_run_cost(store, record) if record.attempt > 1 else 0.0
        self.promise(
            record.submission_key, limit_usd, by_agent=record.by_agent, earlier_usd=earlier_usd
        )

    def promise(
        self, key: str, max_cost_usd: float | None, *, by_agent: bool, earlier_usd: float = 0.0
    ) -> None:
        """Promise money to an attempt or a test; see `LedgerEntry`."""
        self._append(key, by_agent=by_agent, promised_usd=max_cost_usd, earlier_usd=earlier_usd)

    def settle(self, key: str, total_usd: float) -> None:
        """Write down what a run has cost until now, or a test at its end."""
        self._append(key, total_usd=total_usd)

    def withdraw(self, key: str) -> None:
        """Take back the promise for an attempt or a test that was not made after all."""
        with contextlib.suppress(StorageError):  # A day later it counts no more.
            self._append(key, withdrawn=True)

    def _append(self, key: str, **values: object) -> None:
        """Append a line whole, or not at all."""
        line = json.dumps({"key": key, "at": now_iso(), **values}) + "\n"
        with storage_errors(self.file):
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            with open(descriptor, "r+b", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                try:
                    file.write(line.encode())
                    os.fsync(descriptor)
                except OSError:  # A full disk may have taken a part of the line.
                    file.truncate(size)
                    raise


@contextlib.contextmanager
def hold_ledger(home: Path) -> Iterator[Ledger]:
    """Let nobody else promise or settle money until the end of the block."""
    with storage_errors(home):
        home.mkdir(parents=True, exist_ok=True)
    with hold_file_lock(home / ".spending.lock"):
        yield Ledger(home)


def read_ledger(home: Path) -> dict[str, LedgerEntry]:
    """Return the entries of a home by their keys, the oldest first."""
    entries: dict[str, LedgerEntry] = {}
    for line in read_json_lines(home / FILE_NAME):
        key = str(line.get("key"))
        if line.get("withdrawn"):
            entries.pop(key, None)
        elif key not in entries or "by_agent" in line:
            entries[key] = _read_promise(key, line)
            _close_attempt_before(entries, entries[key])
        else:
            total_usd = float(line.get("total_usd") or 0.0)
            entries[key] = replace(entries[key], at=str(line["at"]), total_usd=total_usd)
    return entries


def _close_attempt_before(entries: dict[str, LedgerEntry], entry: LedgerEntry) -> None:
    """Settle an unsettled earlier attempt with the cost of the run at its end.

    What the run spends from then on belongs to the newer attempt alone.
    """
    run_id, _, attempt = entry.key.rpartition("-")
    before = entries.get(f"{run_id}-{int(attempt) - 1}") if attempt.isdecimal() else None
    if before is not None and before.is_open:
        entries[before.key] = replace(before, at=entry.at, total_usd=entry.earlier_usd)


def _read_promise(key: str, line: Json) -> LedgerEntry:
    """Return the entry of a line that promises money."""
    return LedgerEntry(
        key=key,
        at=str(line["at"]),
        by_agent=bool(line.get("by_agent")),
        promised_usd=line.get("promised_usd"),
        earlier_usd=float(line.get("earlier_usd") or 0.0),
        total_usd=line.get("total_usd"),
    )


def has_had_run(home: Path, run_id: str) -> bool:
    """Return whether this home has made a run, which may have been removed since."""
    return f"{run_id}-1" in read_ledger(home)


def compute_run_cost(store: RunStore, record: RunRecord) -> float:
    """Return the known cost of a run until now in US dollars."""
    return read_budget_usage(store.dir(record.run_id), record).cost_usd or 0.0


def promise_if_missing(store: RunStore, record: RunRecord) -> None:
    """Promise the money of an attempt that begins without a promise, as a retry in Prefect does; a
    full disk is only logged, as the run's own limit holds.
    """
    if record.submission_key in read_ledger(store.home):
        return
    try:
        limit_usd = None
        if PROFILES[record.profile].is_paid:
            limit_usd = read_effective_config(store.dir(record.run_id)).limits.max_cost_usd
        with hold_ledger(store.home) as ledger:
            ledger.promise_run(store, record, limit_usd)
    except LachesisError as error:
        log.warning("what run %s may cost was not written down: %s", record.run_id, error)


def settle_run(store: RunStore, record: RunRecord) -> None:
    """Write down what a run has cost until the end of its attempt."""
    if PROFILES[record.profile].is_paid:
        settle(store.home, record.submission_key, compute_run_cost(store, record))


def settle(home: Path, key: str, total_usd: float) -> None:
    """Write down what a run or a test has cost; a full disk is only logged."""
    try:
        with hold_ledger(home) as ledger:
            ledger.settle(key, total_usd)
    except LachesisError as error:
        log.warning("what %s has cost was not written down: %s", key, error)
