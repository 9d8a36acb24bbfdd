"""Run `edit`, `stop` and `rm`: change what a person wrote on a run, stop it, or remove it."""

import sys
from typing import Annotated

from cyclopts import Parameter

from lachesis.base.errors import ArgumentsError
from lachesis.base.formatting import format_bytes
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.cli.options import Output, Run, Runs, options_class
from lachesis.cli.terminal import print_answer
from lachesis.operations.runs import (
    edit_labels,
    get_run,
    remove_runs,
    require_all_removable,
    stop_run,
    wait_for_end,
)
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore


@options_class
class EditOptions(Output):
    """Options of `lachesis edit`."""

    name: Annotated[str | None, Parameter(help="a new name; an empty one removes it")] = None
    note: Annotated[str | None, Parameter(help="a new note; an empty one removes it")] = None
    tag: Annotated[tuple[str, ...], Parameter(help="a tag to add; may be repeated")] = ()
    untag: Annotated[tuple[str, ...], Parameter(help="a tag to remove", metavar="TAG")] = ()


def edit(run: Run, /, *, options: EditOptions = EditOptions()) -> None:
    """Change the name, the note or the tags of a run, and print them."""
    changes = (options.name, options.note, options.tag or None, options.untag or None)
    if all(change is None for change in changes):
        raise ArgumentsError(
            f"nothing to change in run {run}; give --name, --note, --tag or --untag"
        )
    record = edit_labels(
        RunStore(),
        run,
        name=options.name,
        note=options.note,
        add_tags=list(options.tag),
        remove_tags=list(options.untag),
    )
    answer = record.model_dump(include={"run_id", "name", "note", "tags"})
    text = (
        f"run {record.run_id}: name {record.name or 'none'}, tags "
        f"{', '.join(record.tags) or 'none'}, note {record.note or 'none'}"
    )
    print_answer(options, answer, text)


def stop(
    run: Run,
    /,
    *,
    now: Annotated[
        bool, Parameter(help="stop without a checkpoint; also ends a stop that takes too long")
    ] = False,
    options: Output = Output(),
) -> None:
    """Stop a run and wait at most a minute for its end."""
    store = RunStore()
    was_alive = not get_run(store, run).has_ended
    answer = stop_run(store, run, now=now)
    record = wait_for_end(store, run)
    answer["status"] = record.status
    if was_alive and record.status == "stopped":
        start = Checkpoints(store.dir(run).checkpoints).describe_start()
        answer["message"] = f"run {run} is stopped; `lachesis resume {run}` continues it {start}"
    elif was_alive and record.has_ended:
        answer["message"] = f"run {run} is {record.status}; it ended before it could be stopped"
    print_answer(options, answer, answer["message"])


def remove(
    runs: Runs,
    /,
    *,
    yes: Annotated[bool, Parameter(("--yes", "-y"), help="ask no question")] = False,
    options: Output = Output(),
) -> int:
    """Remove ended runs after a question."""
    store = RunStore()
    # What cannot be removed is refused before the question, and before anything is removed.
    num_bytes = require_all_removable(store, runs)
    records = [store.load(run_id) for run_id in runs]
    if not yes and not _ask(records, num_bytes):
        print_answer(options, {"removed": []}, "nothing was removed")
        return 1
    remove_runs(store, runs)
    removed, total_bytes = list(runs), sum(num_bytes.values())
    text = f"removed {', '.join(removed)} ({format_bytes(total_bytes)})"
    print_answer(options, {"removed": removed, "bytes": total_bytes}, text)
    return 0


def _ask(records: list[RunRecord], num_bytes: dict[str, int]) -> bool:
    """Return whether the user agrees to remove these runs.

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
