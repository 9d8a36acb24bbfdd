"""Print the log of one process of a run, and follow it until the run ends."""

import json
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lachesis.base.argparse_types import NUM_LINES
from lachesis.base.formatting import show_controls
from lachesis.cli.options import Output, Run, number, options_class
from lachesis.operations.runs import get_run, read_log
from lachesis.runs.folder import shorten_service_name
from lachesis.runs.store import RunStore


@options_class
class LogOptions(Output):
    """Options of `lachesis logs`."""

    follow: Annotated[
        bool, Parameter(("--follow", "-f"), help="follow the log until the run ends")
    ] = False
    lines: Annotated[int, number(NUM_LINES, "lines to show", "--lines", "-n", default=50)] = 50


def logs(
    run: Run,
    service_name: Annotated[
        str | None,
        Parameter(
            "SERVICE",
            help="trainer, env, env-NAME, api or engine (default: "
            "the process that failed, else trainer)",
        ),
    ] = None,
    /,
    *,
    options: LogOptions = LogOptions(),
) -> None:
    """Print the end of a log, and with `--follow` each new line."""
    store = RunStore()
    name = shorten_service_name(service_name or store.load(run).failed_service or "trainer")
    path, text, position = read_log(store, run, name, options.lines)
    if options.json:
        answer = {"run_id": run, "service": name, "path": str(path), "lines": text.splitlines()}
        print(json.dumps(answer, indent=2))
        return
    print(_show(text) or f"{path} is empty or does not exist yet")
    while options.follow:
        # checked before reading, so that the last lines are not missed
        ended = get_run(store, run).has_ended
        position = _print_new_output(path, position)
        if ended:
            return
        time.sleep(0.5)


def _show(text: str) -> str:
    """Return a part of a log for a terminal; each state of a progress bar is a line."""
    return show_controls(text.replace("\r\n", "\n").replace("\r", "\n"))


def _print_new_output(path: Path, position: int) -> int:
    """Print the text behind a position of a log (bytes), and return the new position."""
    if not path.exists():
        return position
    with path.open("rb") as file:
        if path.stat().st_size < position:
            position = 0  # the log was rotated, so this is a new file
        file.seek(position)
        print(_show(file.read().decode(errors="replace")), end="", flush=True)
        return file.tell()
