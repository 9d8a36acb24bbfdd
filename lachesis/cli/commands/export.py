"""Run `export`: export what was trained, and push it to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lachesis.base.errors import ArgumentsError
from lachesis.base.json_text import Json
from lachesis.checkpoints import export_weights, push_to_hub
from lachesis.cli.commands import run_status
from lachesis.cli.options import CHECKPOINT_HELP, Output, Run, options_class
from lachesis.cli.terminal import print_answer
from lachesis.config.profiles import adopt_profile_keys
from lachesis.operations.service import LachesisService
from lachesis.reporting.model_card import build_model_card
from lachesis.runs.folder import RunDir
from lachesis.runs.record import RunRecord
from lachesis.runs.store import read_effective_config


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
    """Export the weights of a run, and push them if that was asked for.

    Raises:
        CheckpointError: The exported weights differ from those that were trained.
    """
    if options.merged and options.no_verify:
        raise ArgumentsError("--merged and --no-verify exclude each other; give one of them")
    service = LachesisService()
    record = service.get_run(run)
    run_dir = service.store.dir(record.run_id)
    if options.push_to_hub:
        repository = push_to_hub.find_repository(options.push_to_hub)
        note = _export_and_push(record, run_dir, options, repository)
    else:
        note = _export(record, run_dir, options)
    print_answer(options, note, run_status.render_export(note))


def _export(record: RunRecord, run_dir: RunDir, options: ExportOptions) -> Json:
    backend = read_effective_config(run_dir).tinker.backend
    adopt_profile_keys(record.profile, backend=backend)
    return export_weights.export(
        record,
        run_dir,
        Path(options.to).expanduser(),
        checkpoint=options.checkpoint,
        merged=options.merged,
        verify=not options.no_verify,
    )


def _export_and_push(
    record: RunRecord, run_dir: RunDir, options: ExportOptions, repository: str
) -> Json:
    """Export and push; what an earlier command has exported to the same folder is only pushed."""
    push_to_hub.check_base_model(record.base_model, merged=options.merged)
    target = Path(options.to).expanduser()
    note = export_weights.find_earlier_export(
        record, run_dir, target, checkpoint=options.checkpoint, merged=options.merged
    ) or _export(record, run_dir, options)
    card = build_model_card(record, run_dir, note, repository, merged=options.merged)
    pushed = push_to_hub.push_weights(
        repository, target, note, card, merged=options.merged, public=options.public
    )
    return {**note, "pushed": pushed}
