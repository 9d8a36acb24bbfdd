"""Run `lachesis demo`: train a tiny model, up to weights that `peft` loads."""

import contextlib
import json
import random
from typing import Annotated

from rich.table import Table
from rich.text import Text

from lachesis.base.argparse_types import NUM_STEPS, SEED
from lachesis.base.json_text import read_json_lines
from lachesis.cli import terminal
from lachesis.cli.commands import run_status, watch
from lachesis.cli.options import Output, number
from lachesis.config.launch_spec import LaunchSpec
from lachesis.operations.launches import resolve_launch, start_run
from lachesis.operations.runs import get_run_url, stop_run, view_run, wait_for_end, wait_until_gone
from lachesis.operations.server import START_DURATION, LauncherProcess, find_running_server
from lachesis.reporting.run_schemas import build_run_results
from lachesis.reporting.run_view import RunView
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import find_held_out_answers
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.tiny_model import build

ENVIRONMENT = "arithmetic"


def demo(
    *,
    seed: Annotated[int, number(SEED, "seed of the run", default=0)] = 0,
    steps: Annotated[
        int | None, number(NUM_STEPS, "training steps (default: the profile's)")
    ] = None,
    options: Output = Output(),
) -> int:
    """Run the demo with the seed and the steps that were given."""
    return run_demo(RunStore(), seed=seed, steps=steps, as_json=options.json)


def run_demo(store: RunStore, *, seed: int, steps: int | None, as_json: bool) -> int:
    """Run the demo and return exit code 0 if the run has completed.

    Ctrl-C stops the run and ends every process that the demo has started.
    """
    spec = LaunchSpec(
        environment=ENVIRONMENT, steps=steps, seed=seed, settings={"env.data_seed": seed}
    )
    resolve_launch(store, spec)  # Wrong input is refused before anything is started.
    terminal.print_note(f"model: {build.ensure_tiny_model(build.TinyModelRecipe())}")
    with contextlib.ExitStack() as stack:
        server = find_running_server()
        if server is None:
            terminal.print_note(f"starting the Prefect server and the runner ({START_DURATION})")
            stack.enter_context(LauncherProcess())
            server = find_running_server() or {}
        terminal.print_note(f"Prefect UI: {server.get('ui_url')}")
        record = start_run(store, spec)
        record = _watch_run(store, record, as_json=as_json)
        wait_until_gone(store, record)
    view = view_run(store, record.run_id)
    if as_json:
        print(json.dumps(build_run_results(view).to_payload(), indent=2))
    else:
        _print_results(view)
    return 0 if record.status == "completed" else 1


def _watch_run(store: RunStore, record: RunRecord, *, as_json: bool) -> RunRecord:
    """Watch the run until it ends; Ctrl-C stops it and waits for its last process."""
    try:
        return watch.watch_until_end(store, record.run_id, quiet=as_json)
    except KeyboardInterrupt:
        terminal.print_note(f"stopping run {record.run_id}; it saves a checkpoint first")
        stop_run(store, record.run_id)
        wait_for_end(store, record.run_id)
        wait_until_gone(store, record)
        raise


def _print_results(view: RunView) -> None:
    """Print answers, reward and held-out share before and after the training."""
    record, samples = view.record, _read_samples(view.run_dir)
    if samples:
        table = Table(
            "held-out sum",
            "before training",
            "after training",
            "right",
            title="sampled answers",
            title_justify="left",
        )
        for question, before, after, right in samples:
            table.add_row(
                question, before, Text(after, style="green" if after == right else "red"), right
            )
        terminal.console.print(table)
    terminal.print_sentence(
        Text(
            f"the Prefect UI of this run, while `lachesis serve` runs: {get_run_url(record)}",
            style="dim",
        )
    )
    terminal.print_sentence(
        Text(
            f"lachesis export {record.run_id} --to DIR exports the adapter with its checksums",
            style="dim",
        )
    )
    terminal.console.print(run_status.render_results(view))


def _read_samples(run_dir: RunDir, count: int = 6) -> list[tuple[str, str, str, str]]:
    """Return question, answers before and after, and correct answer of some items."""
    answers: dict[str, dict[str, tuple[str, str]]] = {}
    for when, (_, file) in find_held_out_answers(run_dir).items():
        for line in read_json_lines(file):
            answers.setdefault(line["question"], {}).setdefault(
                when, (line["model_answer"], line["answer"])
            )
    both = {
        question: before_and_after
        for question, before_and_after in answers.items()
        if len(before_and_after) == 2
    }
    chosen = random.Random(0).sample(sorted(both), min(count, len(both)))
    return [
        (question, both[question]["before"][0], *both[question]["after"]) for question in chosen
    ]
