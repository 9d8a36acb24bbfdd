"""Find the run that a person means: by the beginning of its id, its name, or as the newest."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lachesis.base.errors import UnknownRunError
from lachesis.runs.run_record import RunRecord
from lachesis.runs.store import RunStore

NEWEST = "@last"


def resolve_run_id(store: RunStore, text: str) -> str:
    """Return the id of the run that a text means.

    Args:
        store: The runs.
        text: The id, a beginning of it that no other run's id has, a name, or `@last`. Of several
            runs with this name, the newest is meant.

    Returns:
        The id; a text that means no run is returned as it is, for the error of whoever loads it.

    Raises:
        UnknownRunError: Several runs begin like this, or there is no run yet.
    """
    if text == NEWEST:
        records = store.all()
        if not records:
            raise UnknownRunError("there is no run yet, so there is no last one; start one first")
        return records[0].run_id
    if re.fullmatch(r"[0-9a-f]{8}", text):
        return text
    records = store.all()
    if re.fullmatch(r"[0-9a-f]{1,7}", text):
        matching = [record for record in records if record.run_id.startswith(text)]
        if matching:
            return _take_only(matching, text)
    # The newest come first.
    return next((record.run_id for record in records if record.name == text), text)


def _take_only(records: Sequence[RunRecord], beginning: str) -> str:
    """Return the id of the only record that has this beginning.

    Raises:
        UnknownRunError: There are several.
    """
    if len(records) == 1:
        return records[0].run_id
    described = ", ".join(
        f"{record.run_id} ({record.name or record.environment}, {record.status})"
        for record in records[:10]
    )
    raise UnknownRunError(f"{len(records)} runs begin with {beginning!r}: {described}")


def resolve_checkpoint_name(store: RunStore, text: str) -> str:
    """Return RUN, RUN@STEP or RUN@best with the id of the run that `RUN` means.

    Raises:
        UnknownRunError: Several runs begin like this, or there is no run yet.
    """
    is_newest = text == NEWEST or text.startswith(f"{NEWEST}@")
    run, at, checkpoint = (
        text.removeprefix("@").partition("@") if is_newest else text.partition("@")
    )
    return resolve_run_id(store, f"@{run}" if is_newest else run) + at + checkpoint
