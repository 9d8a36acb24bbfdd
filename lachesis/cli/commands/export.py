"""Run `export`: export trained weights, and push them to the Hugging Face Hub."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lachesis.base.errors import ArgumentsError
from lachesis.cli.commands import run_status
from lachesis.cli.options import CHECKPOINT_HELP, Output, Run, options_class
from lachesis.cli.terminal import print_answer
from lachesis.operations.weights import export_and_push_run, export_run
from lachesis.runs.store import RunStore


@options_class
class ExportOptions(Output):
    """Options of `lachesis export`."""

    to: Annotated[str, Parameter(help="a new or empty folder", metavar="DIR")]
    checkpoint: Annotated[str, Parameter(help=CHECKPOINT_HELP, metavar="best|last|STEP")] = "last"
    merged: Annotated[
        bool, Parameter(help="also export the merged model, in the subfolder merged/")
    ] = False
    no_verify: Annotated[bool, Parameter(help="do not load and compare the exported files")] = False
    push_to_hub: Annotated[
        str | None,
        Parameter(
            help="also push the adapter, or with --merged the merged model, to this repository of "
            "the Hugging Face Hub, with a card; a new repository is private",
            metavar="OWNER/NAME",
        ),
    ] = None
    public: Annotated[bool, Parameter(help="with --push-to-hub: make a new repository public")] = (
        False
    )


def export(run: Run, /, *, options: ExportOptions) -> None:
    """Export the weights of a run, and push them to the Hub if a repository is given.

    Raises:
        CheckpointError: The exported weights differ from those that were trained.
    """
    if options.merged and options.no_verify:
        raise ArgumentsError("--merged and --no-verify exclude each other; give one of them")
    target = Path(options.to).expanduser()
    verify = not options.no_verify
    if options.push_to_hub:
        note = export_and_push_run(
            RunStore(),
            run,
            target,
            options.push_to_hub,
            checkpoint=options.checkpoint,
            merged=options.merged,
            verify=verify,
            public=options.public,
        )
    else:
        note = export_run(
            RunStore(),
            run,
            target,
            checkpoint=options.checkpoint,
            merged=options.merged,
            verify=verify,
        )
    print_answer(options, note, run_status.render_export(note))
