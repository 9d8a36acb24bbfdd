"""Run `lachesis edit` and `lachesis rm`: change what a person wrote on a run, and remove runs."""

from __future__ import annotations

import argparse
import sys

from lachesis.base.errors import ArgumentsError
from lachesis.base.formatting import format_bytes
from lachesis.cli.console import print_answer
from lachesis.operations.service import LachesisService
from lachesis.runs.names_and_tags import edit_labels
from lachesis.runs.record import RunRecord
from lachesis.runs.removal import measure_run, remove_run, require_removable
from lachesis.runs.store import RunStore


def handle_edit(args: argparse.Namespace) -> None:
    """Change the name, the note or the tags of a run, and print them."""
    changes = (args.name, args.note, args.tag or None, args.untag or None)
    if all(change is None for change in changes):
        raise ArgumentsError(
            f"nothing to change in run {args.run}; give --name, --note, --tag or --untag"
        )
    record = edit_labels(
        RunStore(),
        args.run,
        name=args.name,
        note=args.note,
        add_tags=args.tag,
        remove_tags=args.untag,
    )
    answer = record.model_dump(include={"run_id", "name", "note", "tags"})
    text = (
        f"run {record.run_id}: name {record.name or 'none'}, tags "
        f"{', '.join(record.tags) or 'none'}, note {record.note or 'none'}"
    )
    print_answer(args, answer, text)


def handle_rm(args: argparse.Namespace) -> int:
    """Remove ended runs after a question."""
    service = LachesisService()
    # What cannot be removed is refused before the question, and before anything is removed.
    records = [service.get_run(run_id) for run_id in args.runs]
    for record in records:
        require_removable(service.store, record)
    num_bytes = {record.run_id: measure_run(service.store, record.run_id) for record in records}
    if not args.yes and not _ask(records, num_bytes):
        print_answer(args, {"removed": []}, "nothing was removed")
        return 1
    for record in records:
        remove_run(service.store, record)
    removed, total_bytes = [record.run_id for record in records], sum(num_bytes.values())
    text = f"removed {', '.join(removed)} ({format_bytes(total_bytes)})"
    print_answer(args, {"removed": removed, "bytes": total_bytes}, text)
    return 0


def _ask(records: list[RunRecord], num_bytes: dict[str, int]) -> bool:
    """Return whether the user agrees.

    Raises:
        ArgumentsError: Nobody can answer, because the standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise ArgumentsError(
            "removing runs asks a question, and the standard input is not a terminal; --yes "
            "removes them without it"
        )
    for record in records:
        print(
            f"{record.run_id}  {record.name or record.environment}, {record.status}, "
            f"{format_bytes(num_bytes[record.run_id])}"
        )
    text = "Remove this run with its checkpoints and weights? [y/N] "
    if len(records) > 1:
        text = f"Remove these {len(records)} runs with their checkpoints and weights? [y/N] "
    return input(text).strip().lower() in ("y", "yes")
