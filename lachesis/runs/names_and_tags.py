"""Change the name, note and tags of a run, and find a run by its id or name."""

import re
from collections.abc import Iterable, Sequence

from lachesis.base.errors import UnknownRunError
from lachesis.config.launch_spec import check_name, check_note, check_tags
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore


def edit_labels(
    store: RunStore,
    run_id: str,
    *,
    name: str | None = None,
    note: str | None = None,
    add_tags: Iterable[str] = (),
    remove_tags: Iterable[str] = (),
) -> RunRecord:
    """Change what a person wrote on a run.

    Args:
        store: The runs.
        run_id: The run, which may be alive.
        name: A new name; an empty one removes it, None keeps it.
        note: A new note, likewise.
        add_tags: Tags to add.
        remove_tags: Tags to remove.

    Returns:
        The changed record.

    Raises:
        FieldValueError: A text is not allowed.
        UnknownRunError: There is no such run.
    """
    changes: dict[str, object] = {}
    if name is not None:
        changes["name"] = check_name(name)
    if note is not None:
        changes["note"] = check_note(note)
    removed = set(remove_tags)
    added = check_tags(add_tags)

    # Tags are changed as they are on disk now: two commands may add one each at the same time.
    def make_changes(record: RunRecord) -> dict[str, object]:
        tags = check_tags({*record.tags, *added} - removed)
        return changes if tags == record.tags else {**changes, "tags": tags}

    return store.change(run_id, make_changes)


NEWEST = "@last"


def resolve_run_id(store: RunStore, text: str) -> str:
    """Return the id of the run with this id, id prefix or name, or of the last run for `@last`.

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
