"""Find the run that a person means: by the beginning of its id, or as the newest one."""

from __future__ import annotations

import re

from lachesis.base.errors import UnknownRunError
from lachesis.runs.store import RunStore

NEWEST = "@last"


def resolve_run_id(store: RunStore, text: str) -> str:
    """Return the id of the run that a text means.

    Args:
        store: The runs.
        text: The id, a beginning of it that no other run's id has, or `@last`.

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
    if not re.fullmatch(r"[0-9a-f]{1,7}", text):
        return text
    matching = [record for record in store.all() if record.run_id.startswith(text)]
    if len(matching) > 1:
        described = ", ".join(
            f"{record.run_id} ({record.name or record.environment}, {record.status})"
            for record in matching[:10]
        )
        raise UnknownRunError(f"{len(matching)} runs begin with {text!r}: {described}")
    return matching[0].run_id if matching else text


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
